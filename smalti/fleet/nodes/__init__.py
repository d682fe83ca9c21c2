"""Agents of a run on several machines (``train.nodes``).

``smalti train`` on one node is the lead: it decides everything (``lead.py``). ``smalti fleet join`` on each other node
starts, watches and kills the ranks of its node for it (``joined.py``).

A side that does not hear from the other for the lease takes it for lost: the lead ends the attempt on all other nodes,
a joined agent kills its ranks before it joins again. Each start of ranks has a number, and messages about an earlier
one are ignored, so ranks of two attempts never run together on a node.
"""
