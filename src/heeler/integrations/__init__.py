"""Heeler in other people's training loops: `import heeler.integrations.transformers`, `.accelerate` or `.lightning`."""
