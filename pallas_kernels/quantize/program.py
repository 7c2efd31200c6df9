"""The quantizer as every thread of a block of threads runs it.

Four neighbouring lanes, a quad, take four consecutive scale blocks (a chunk) at a time: lane q reads
quarter q of each block, so that what it writes in the kernel's order is contiguous. Block maxima are
reduced over the quad, row maxima over the quads of the row. A row is read once: its words stay in
registers between the maximum and the codes.
"""

from typing import Any

from pallas_kernels.quantize.lanes import INFINITY, MAGNITUDE_MASK, UPPER
from pallas_kernels.quantize.plan import Lane, Ops, Place, Plan, Refs
from pallas_kernels.quantize.writes import store_codes, store_operand, store_outer


def run(ops: Ops, plan: Plan, refs: Refs) -> None:
    """Quantizes the rows of this block of threads."""
    task = plan.task
    thread = ops.thread()
    lane, quad = thread & 3, thread >> 2
    if plan.quads <= 8:
        shift = plan.quads.bit_length() - 1
        row, quad = ops.block() * plan.rows + (quad >> shift), quad & (plan.quads - 1)
    else:
        row = ops.block()
    places = [_place(ops, plan, lane, row, quad + turn * plan.quads) for turn in range(plan.turns)]
    exact = [_load(ops, plan, refs.x, place) for place in places]
    tiles = [_narrowed(ops, plan, tile) for tile in exact]
    outer = _outer(ops, plan, refs, tiles, 0)
    kept = []
    for place, tile, whole in zip(places, tiles, exact, strict=True):
        blocks = _encode(ops, plan, tile, outer)
        store_operand(ops, plan, refs.operand, place, blocks, None)
        store_codes(ops, plan, refs, place, blocks)
        if task.residual != "none":
            kept.append(_narrowed(ops, plan, _remainders(ops, whole, blocks, outer), wide=True))
    store_outer(ops, plan, refs.outer, places[0], quad, outer)
    if task.residual == "none":
        return
    second = _outer(ops, plan, refs, kept, 1)
    fold = _fold(ops, plan, outer, second)
    for place, tile in zip(places, kept, strict=True):
        blocks = _encode(ops, plan, tile, second)
        if task.residual == "2:4":
            for block in blocks:
                _drop_half(ops, block)
        store_operand(ops, plan, refs.residual, place, blocks, fold)
    store_outer(ops, plan, refs.residual_outer, places[0], quad, second)


# ---- reading ---------------------------------------------------------------------------------------
def _place(ops: Ops, plan: Plan, lane: Lane, row: Lane, chunk: Lane) -> Place:
    rows_fit = plan.m % plan.rows == 0
    exact = plan.quads * plan.turns == plan.steps
    valid = None if rows_fit else row < plan.m
    if not exact:
        here = chunk < plan.steps
        valid = here if valid is None else ops.both(valid, here)
    inside: list[Lane | None] = [valid] * 4
    blocks = plan.k // plan.task.block
    if blocks != 4 * plan.steps:
        for block in range(4):
            here = (chunk << 2) + block < blocks
            inside[block] = here if valid is None else ops.both(valid, here)
    return Place(lane=lane, row=row, chunk=chunk, valid=valid, inside=inside)


def _load(ops: Ops, plan: Plan, x: Any, place: Place) -> list[list[Lane]]:
    """Of each of the four blocks, the lane's elements as float32 patterns."""
    task, quarter = plan.task, plan.quarter
    elements = []
    for block, inside in enumerate(place.inside):
        at = place.row * plan.k + place.chunk * task.chunk + block * task.block + place.lane * quarter
        if plan.wide:
            words = ops.load(x, at, quarter, inside)
            elements.append(words)
        else:
            words = ops.load(x, at >> 1, quarter // 2, inside)
            elements.append([half for word in words for half in (word << 16, word & UPPER)])
    return elements


def _narrowed(ops: Ops, plan: Plan, tile: list[list[Lane]], *, wide: bool = False) -> list[list[Lane]]:
    """Patterns rounded to odd at eight significant bits, where the format looks at no more."""
    if not plan.task.form.NARROW or not (wide or plan.wide):
        return tile
    upper = ops.uint(UPPER)
    return [[(pattern | ((pattern & 0xFFFF) + 0xFFFF)) & upper for pattern in block] for block in tile]


# ---- scales ----------------------------------------------------------------------------------------
def _magnitude(x: Lane) -> Lane:
    return x & MAGNITUDE_MASK


def _largest(ops: Ops, lanes: list[Lane]) -> Lane:
    """The largest magnitude of patterns that a lane holds."""
    total = _magnitude(lanes[0])
    for x in lanes[1:]:
        total = ops.largest(total, _magnitude(x))
    return total


def _over_quad(ops: Ops, maxima: list[Lane], narrow: bool) -> list[Lane]:
    """Largest over the quad, of the four blocks; two at a time where 16 bits hold them."""
    if not narrow:
        for distance in (1, 2):
            maxima = [ops.largest(x, ops.from_lane(x, distance)) for x in maxima]
        return maxima
    pairs = [(maxima[i] >> 16) | maxima[i + 1] for i in (0, 2)]  # both patterns have empty lower halves
    for distance in (1, 2):
        pairs = [ops.largest_halves(x, ops.from_lane(x, distance)) for x in pairs]
    return [half for pair in pairs for half in (pair << 16, pair & UPPER)]


def _outer(ops: Ops, plan: Plan, refs: Refs, tiles: list[list[list[Lane]]], which: int) -> dict[str, Any]:
    """Block maxima of all tiles, and the biased exponent of the row's outer scale where there is one."""
    form = plan.task.form
    maxima = [_over_quad(ops, [_largest(ops, block) for block in tile], form.NARROW) for tile in tiles]
    if not form.OUTER:
        return {"maxima": maxima, "exponent": None}
    if plan.task.outer == "static" and which == 0:
        [pattern] = ops.load(refs.static, ops.uint(0), 1, None)
        exponent = pattern >> 23
        bad = exponent >= ops.uint(255)
        maxima = [[ops.where(bad, ops.uint(INFINITY), x) for x in tile] for tile in maxima]
        return {"maxima": maxima, "exponent": exponent}
    finite = [ops.where(x >= ops.uint(INFINITY), ops.uint(0), x) for tile in maxima for x in tile]
    row = finite[0]
    for x in finite[1:]:
        row = ops.largest(row, x)
    return {"maxima": maxima, "exponent": form.outer_exponent(ops, _over_row(ops, plan, refs, row, which))}


def _over_row(ops: Ops, plan: Plan, refs: Refs, x: Lane, which: int) -> Lane:
    """Largest over the quads of a row; the four lanes of a quad hold the same."""
    if plan.quads < 8:
        for distance in (4, 8)[: plan.quads.bit_length() - 1]:
            x = ops.largest(x, ops.from_lane(x, distance))
        return x
    x = ops.largest_of_warp(x)
    if plan.quads == 8:
        return x
    return ops.largest_of_block(x, refs.scratch, 4 * plan.groups, which)


def _fold(ops: Ops, plan: Plan, first: dict[str, Any], second: dict[str, Any]) -> Lane | None:
    """2^(k_r - k_x) as float32, or None where nothing is folded."""
    if not plan.task.form.OUTER or not plan.task.folded:
        return None
    return ops.value((second["exponent"] + 127 - first["exponent"]) << 23)


# ---- encoding --------------------------------------------------------------------------------------
def _encode(ops: Ops, plan: Plan, tile: list[list[Lane]], outer: dict[str, Any]) -> list[dict[str, Any]]:
    """The four blocks: element magnitudes, products with their scales, signs."""
    maxima = outer["maxima"].pop(0)
    encode = _encode_hif4 if plan.task.fmt == "hif4" else _encode_e2m1
    return [encode(ops, plan, x, amax, outer["exponent"]) for x, amax in zip(tile, maxima, strict=True)]


def _encode_e2m1(ops: Ops, plan: Plan, x: list[Lane], amax: Lane, outer: Lane) -> dict[str, Any]:
    form = plan.task.form
    scale = form.scale(ops, amax, outer, plan.task.scale_rule)
    elements = [form.element(ops, _magnitude(e), scale, outer) for e in x]
    return {
        "scale": scale,
        "elements": elements,
        "products": [form.product(ops, e, scale) for e in elements],
        "signs": [e & scale["sign"] for e in x],
    }


def _encode_hif4(ops: Ops, plan: Plan, x: list[Lane], amax: Lane, outer: None) -> dict[str, Any]:
    del outer
    form = plan.task.form
    scale = form.scale(ops, amax, plan.task.scale_rule)
    fours = [_largest(ops, x[i : i + 4]) for i in range(0, 16, 4)]
    one = ops.real(1.0)
    eights = [ops.largest(fours[0], fours[1]), ops.largest(fours[2], fours[3])]
    two = [form.factor(ops, peak, scale, 4.0, one) for peak in eights]
    three = [form.factor(ops, peak, scale, 2.0, two[i // 2]) for i, peak in enumerate(fours)]
    fine = [two[i // 2] * three[i] for i in range(4)]
    elements = [form.element(ops, _magnitude(e), scale, fine[i // 4]) for i, e in enumerate(x)]
    return {
        "scale": scale,
        "two": two,
        "three": three,
        "elements": elements,
        "products": [form.product(ops, e, scale, fine[i // 4]) for i, e in enumerate(elements)],
        "signs": [e & scale["sign"] for e in x],
    }


def _drop_half(ops: Ops, block: dict[str, Any]) -> None:
    """Keeps the two largest of every four products; all of a poisoned block's."""
    magnitudes, products = block["elements"], block["products"]
    alive = block["scale"]["sign"] > ops.uint(0)
    zero = ops.real(0.0)
    for start in range(0, len(magnitudes), 4):
        four = magnitudes[start : start + 4]
        before = {}  # (i, j): 1 where i comes before j
        for i in range(4):
            for j in range(i + 1, 4):
                first = four[i] >= four[j]
                before[i, j] = ops.where(first, ops.uint(1), ops.uint(0))
                before[j, i] = ops.where(first, ops.uint(0), ops.uint(1))
        for i in range(4):
            others = [before[j, i] for j in range(4) if j != i]
            drop = ops.both(others[0] + others[1] + others[2] >= ops.uint(2), alive)
            products[start + i] = ops.where(drop, zero, products[start + i])
            signs = block["signs"]
            signs[start + i] = ops.where(drop, ops.uint(0), signs[start + i])


def _remainders(
    ops: Ops, tile: list[list[Lane]], blocks: list[dict[str, Any]], outer: dict[str, Any]
) -> list[list[Lane]]:
    """Patterns of x - product * outer scale, in float32."""
    result = []
    for x, block in zip(tile, blocks, strict=True):
        power = None if outer["exponent"] is None else ops.value(outer["exponent"] << 23)
        part = []
        for e, product, sign in zip(x, block["products"], block["signs"], strict=True):
            signed = ops.value(ops.bits(product) | sign)
            first = signed if power is None else signed * power
            part.append(ops.bits(ops.value(e) - first))
        result.append(part)
    return result
