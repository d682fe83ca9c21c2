"""What is known of each node: its checks, faults and runs, and whether it is cordoned.

Both tables (``fleet_node_records``, ``fleet_cordons``) are in the database of ``SMALTI_HOME``; only this package writes
them.
"""
