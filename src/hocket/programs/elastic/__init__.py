"""Membership of workers that come and go: a rendezvous, its members, and the rule by which members agree on an exchange."""
