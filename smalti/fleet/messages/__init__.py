"""Messages about incidents: one for each incident and receiver, kept in an outbox until the receiver has accepted it.

The receivers are in ``fleet.yaml``. ``fleet_incidents`` and ``fleet_outbox`` in the database of ``SMALTI_HOME`` are
written only here.
"""
