"""Gossip without a common step: pairs of workers that average (AD-PSGD), and push-sum (SGP)."""
