"""Torch-free pydantic schemas, one file per concern, and the YAML loader."""
