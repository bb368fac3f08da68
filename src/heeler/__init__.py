"""Heeler puts training examples into an order in which SGD converges faster."""
