"""LSTM and GRU."""
