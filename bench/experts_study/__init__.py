"""The parts of ``bench/experts.py``: settings, data, the order of runs, their execution, figures."""
