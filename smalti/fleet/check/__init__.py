"""Checks a node, or several together, before a run uses them: facts, disk, products, links and clocks.

``local`` gathers what one node can say alone, ``judge`` names the odd node from the reports of all.
"""
