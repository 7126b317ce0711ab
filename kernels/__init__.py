"""CUDA source of cupyflash, compiled when a call needs it: pieces for any GPU in core, one folder an architecture."""
