"""firstlight beside the other engines that run a model on a CPU, interleaved in one run: `make bench-peers`.

Nobody imports it but `python -m peers` and its tests. Invariant: a figure comes from a setting whose answer
to a plain question was right in the same visit.
"""
