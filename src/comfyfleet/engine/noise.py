"""The normal numbers that torch draws on a CPU for a seed, without torch."""

import numpy as np
import numpy.typing as npt

# Torch fills blocks of this size at once; fewer values are drawn one by one, another way.
BLOCK = 16
HALF = BLOCK // 2

Words = npt.NDArray[np.uint32]
Normals = npt.NDArray[np.float32]


def standard_normal(count: int, seed: int) -> Normals:
    """`count` normal numbers from a Mersenne Twister of the low 32 bits of `seed`."""
    generator = np.random.RandomState(seed & 0xFFFFFFFF)
    if count < BLOCK:
        return _singly(generator, count)
    return _in_blocks(generator, count)


def _words(generator: np.random.RandomState, count: int) -> Words:
    # Over the whole range of 32 bits, numpy hands out the twister's words as they are.
    return generator.randint(0, 2**32, size=count, dtype=np.uint32)


def _in_blocks(generator: np.random.RandomState, count: int) -> Normals:
    values = _uniform24(_words(generator, count))
    whole = count - count % BLOCK
    values[:whole] = _box_muller(values[:whole])
    if whole < count:
        # A last block that is not full is drawn anew, over values that are already done.
        values[-BLOCK:] = _box_muller(_uniform24(_words(generator, BLOCK)))
    return values


def _uniform24(words: Words) -> Normals:
    return (words & np.uint32(0xFFFFFF)).astype(np.float32) * np.float32(2.0**-24)


def _box_muller(uniform: Normals) -> Normals:
    """In each block the first half gives the radius, the second the angle."""
    blocks = uniform.astype(np.float64).reshape(-1, BLOCK)
    radius = np.sqrt(-2 * np.log(1 - blocks[:, :HALF]))
    angle = 2 * np.pi * blocks[:, HALF:]
    pair = (radius * np.cos(angle), radius * np.sin(angle))
    return np.concatenate(pair, axis=1).reshape(-1).astype(np.float32)


def _singly(generator: np.random.RandomState, count: int) -> Normals:
    """Pairs from two uniforms of 53 bits; of the last pair the second may stay unused."""
    pairs = -(-count // 2)
    words = _words(generator, 4 * pairs).astype(np.uint64)
    bits = (words[0::2] << np.uint64(32) | words[1::2]) & np.uint64(2**53 - 1)
    uniform = bits.astype(np.float64) * 2.0**-53
    angle, radius = 2 * np.pi * uniform[0::2], np.sqrt(-2 * np.log(1 - uniform[1::2]))
    both = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return both.reshape(-1)[:count].astype(np.float32)
