"""The main job: a real transformer on real text, with its attention computed and checked by cupyflash."""
