"""LightningLM: train a sparse language model that grows, on one node."""
