"""Attacks on a daemon, a gateway and a daemon with keys, beside honest clients who are to notice none of them."""
