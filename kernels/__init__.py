"""CUDA source of cupyflash: pieces for any GPU in core and any, and a folder for each architecture."""
