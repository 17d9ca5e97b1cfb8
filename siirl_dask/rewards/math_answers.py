"""Mathematical equality, by the math-verify library: 1/2, 0.5 and a LaTeX fraction are one answer."""

from __future__ import annotations

from siirl_dask.errors import ConfigError


def math_answer(prompt: object, response: str, answer: object, **extra: object) -> float:
    r"""1.0 when the response's answer (in ``\boxed{}``, LaTeX or plain) equals ``answer``, else 0.0.

    ``answer`` may be LaTeX or plain. ValueError where it is no mathematics, ConfigError without the extra ``math``. A
    hard expression can take minutes to compare: set ``rewards.processes`` and ``rewards.timeout``.
    """
    try:
        from math_verify import parse, verify
    except ModuleNotFoundError as error:
        raise ConfigError("math_answer needs math-verify: pip install 'siirl_dask[math]'") from error
    text = str(answer).strip()
    marked = text if "$" in text or "\\boxed" in text else f"${text}$"
    # Its own timeouts use signals, which reach main threads only; rewards.timeout stands in for them.
    expected = parse(marked, parsing_timeout=None)
    if not expected:
        raise ValueError(f"answer {answer!r:.200} is no mathematics that math-verify can read")
    return float(verify(expected, parse(response, parsing_timeout=None), timeout_seconds=None))
