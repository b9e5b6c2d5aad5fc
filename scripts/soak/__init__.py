"""Soak: a real server under mixed traffic while models come, go, change and are killed.

``python -m scripts.soak --seconds 600 [--model smollm2] [--seed 0]``, from the root of the repository.
"""
