"""Runs scheduled batches on a device: rows, forward pass, sampling."""
