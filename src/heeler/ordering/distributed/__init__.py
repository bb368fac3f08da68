"""One order for many workers: a leader that holds the rule, members that send it what they saw, and a transport."""
