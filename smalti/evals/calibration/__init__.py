"""Which tasks, shots and measures tell runs apart: signal, noise and monotonicity in training FLOPs.

``points`` reads the scores of run folders, ``signal`` has the statistics, ``calibrate`` combines them, ``page`` is the
HTML page.
"""
