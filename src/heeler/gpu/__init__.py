"""The solver of `herd` on a GPU. Without Triton or CUDA nothing of this is used."""
