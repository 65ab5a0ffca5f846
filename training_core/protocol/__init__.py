"""The stage protocol: one stage = one child process = one directory addressed by content. No torch here.

See docs/stages.md for the files of a stage directory and the inputs and outputs of each stage.
"""
