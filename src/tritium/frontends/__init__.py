"""Protocols: each parses, calls ``serving.Server``, and renders."""
