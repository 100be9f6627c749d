"""Metrics of a reading against its reference text."""


def edit_distance(first: str, second: str) -> int:
    """Returns the least number of insertions, deletions and substitutions between two strings.

    Levenshtein distance by dynamic programming, O(len(first) * len(second)).
    """
    if len(first) < len(second):
        first, second = second, first
    previous = list(range(len(second) + 1))
    for i, char in enumerate(first, start=1):
        current = [i]
        for j, other in enumerate(second, start=1):
            substituted = previous[j - 1] + (char != other)
            current.append(min(previous[j] + 1, current[j - 1] + 1, substituted))
        previous = current
    return previous[-1]


def exact_match(prediction: str, reference: str) -> float:
    """Returns 1.0 if the texts are equal once surrounding white space is removed, else 0.0."""
    return float(prediction.strip() == reference.strip())


def character_accuracy(prediction: str, reference: str) -> float:
    """Returns max(0, 1 - edit distance / reference length), white space around both removed.

    This is 1 - CER floored at 0. Unrelated strings do not score 0: an alignment always finds some
    characters in common, so compare with the score of readings against other images' references.
    An empty reference scores 1 for an empty prediction and 0 for any other.
    """
    prediction, reference = prediction.strip(), reference.strip()
    if not reference:
        return float(not prediction)
    return max(0.0, 1.0 - edit_distance(prediction, reference) / len(reference))
