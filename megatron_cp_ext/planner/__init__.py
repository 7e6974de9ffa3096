"""What a training will do, computed without devices or processes: groups, tokens, bytes, memory.

Pure functions of degrees and shapes; nothing here knows Megatron.
"""
