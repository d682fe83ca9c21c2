"""Copies of the state in the memory of another node (``train.checkpoint.peer_node``): they survive the loss of a node.

``smalti fleet hold`` on that node serves them (``holder.py``); the agent of a run sends each copy in its shared memory
there, and fetches the newest at its start (``client.py``).
"""
