"""Families of models: how the config and the weights of each are spelled in Hugging Face folders."""
