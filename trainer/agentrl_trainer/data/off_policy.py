"""Tell how a call's sampling differs from the policy that trains: pure functions of one call."""

from __future__ import annotations

import math

from agentrl_tracer.schemas import Call


def sampled_otherwise(call: Call) -> str | None:
    """Name how sampling deviated from the policy at its temperature; None if it did not.

    One of ``greedy`` (temperature 0), ``filtered`` (top-p, top-k), ``biased`` (logit_bias) and
    ``constrained`` (a grammar that forbade something). Log-probs are recorded of the policy at
    temperature 1 in each case, so importance ratios never contain this deviation.
    """
    params = call.params
    top_p, top_k = params.get("top_p"), params.get("top_k")
    if params.get("temperature") == 0:
        return "greedy"
    if (top_p is not None and top_p < 1) or (top_k is not None and top_k > 0):
        return "filtered"
    if params.get("logit_bias"):
        return "biased"
    mass = params.get("constrained_log_mass")
    if params.get("constrained") and (mass is None or mass < -1e-6):
        return "constrained"
    return None


def importance_weight(call: Call) -> float | None:
    """Compute policy / sampling distribution of the whole answer, at most 1; None if unknown.

    For a constrained answer at temperature 1 it is the probability mass that the grammar left, the
    product over the answer's tokens (arXiv:2405.21047).
    """
    kind, mass = sampled_otherwise(call), call.params.get("constrained_log_mass")
    if kind is None:
        return 1.0
    if kind != "constrained" or mass is None or temperature_of(call) != 1.0:
        return None
    return math.exp(min(mass, 0.0))


def temperature_of(call: Call) -> float:
    """Return the temperature that the answer was sampled at, and trains at; 1 for greedy ones."""
    return float(call.params.get("temperature") or 1.0)


def token_versions(call: Call) -> list[int]:
    """Return the adapter version of each sampled token; -1 where unknown.

    ``params["versions"]`` holds ``[first token, version]`` for each stretch of an answer during
    which the adapter was swapped. Without it ``adapter_version`` holds for all tokens.
    """
    version = -1 if call.adapter_version is None else call.adapter_version
    versions = [version] * len(call.response_ids)
    for start, own in call.params.get("versions") or ():
        versions[start:] = [-1 if own is None else own] * (len(versions) - start)
    return versions
