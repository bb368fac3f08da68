"""The field's experiments, as pure functions that report progress through a callback."""
