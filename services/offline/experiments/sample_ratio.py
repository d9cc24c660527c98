"""Test whether the arms' numbers of users fit their shares, valid at any number of looks.

If they do not, one arm lost or double-counted users more than another, and no difference can be trusted.

Source: Lindon and Malek, "Anytime-valid inference for multinomial count data", NeurIPS 2022, equation 6: the Bayes
factor of a Dirichlet mixture against the shares is a test martingale, and its inverse an always valid p-value.
"""

from collections.abc import Mapping
from math import exp, lgamma, log

# The rate of false alarms, each of which stops an experiment.
ALARM = 0.001
# The mixture's weight on the shares, in users. With this weight, a share that is off by a few percent is found soonest.
_PRIOR_USERS = 1_000.0


def p_value(users: Mapping[str, int], shares: Mapping[str, float]) -> float:
    """Return the p-value of "users are assigned by these shares", valid at every look.

    Raises: ValueError if arms and shares differ, or a share is not above zero.
    """
    if users.keys() != shares.keys() or not all(share > 0 for share in shares.values()):
        raise ValueError(f"arms {sorted(users)} with shares {dict(shares)}; allowed: a share above 0 for each arm")
    total = sum(shares.values())
    num_users = sum(users.values())
    log_factor = lgamma(_PRIOR_USERS) - lgamma(_PRIOR_USERS + num_users)
    for arm, count in users.items():
        share = shares[arm] / total
        prior = _PRIOR_USERS * share
        log_factor += lgamma(prior + count) - lgamma(prior) - count * log(share)
    return exp(min(0.0, -log_factor))
