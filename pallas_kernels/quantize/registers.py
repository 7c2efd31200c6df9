"""`lanes.Arrays` in the registers of a GPU's lanes: every value is one 32-bit register of a thread."""

from typing import Any

from jax.experimental.mosaic.gpu import utils as mu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, scf, vector

_INTEGER = {"==": "eq", "!=": "ne", "<": "ult", "<=": "ule", ">": "ugt", ">=": "uge"}
_REAL = {"==": "oeq", "!=": "one", "<": "olt", "<=": "ole", ">": "ogt", ">=": "oge"}
_PREDICATES = {
    **{name: getattr(arith.CmpIPredicate, name) for name in _INTEGER.values()},
    **{name: getattr(arith.CmpFPredicate, name.upper()) for name in _REAL.values()},
}


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _constant(value: Any, real: bool) -> ir.Value:
    if real:
        return arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), float(value)))
    value = int(value)
    signed = value - (1 << 32) if value >> 31 else value
    return arith.constant(_i32(), ir.IntegerAttr.get(_i32(), signed))


class Lane:
    """One register: uint32, float32 (`real`), or a predicate."""

    def __init__(self, value: Any, real: bool = False) -> None:
        self.ir, self.real = value, real

    def _of(self, other: "Lane | int | float") -> "Lane":
        return other if isinstance(other, Lane) else Lane(_constant(other, self.real), self.real)

    def _with(self, other: "Lane | int | float", integer: Any, real: Any = None) -> "Lane":
        other = self._of(other)
        assert self.real == other.real
        return Lane((real if self.real else integer)(self.ir, other.ir), self.real)

    def _compare(self, other: "Lane | int | float", how: str) -> "Lane":
        other = self._of(other)
        assert self.real == other.real
        if self.real:
            return Lane(arith.cmpf(_PREDICATES[_REAL[how]], self.ir, other.ir))
        return Lane(arith.cmpi(_PREDICATES[_INTEGER[how]], self.ir, other.ir))

    def __add__(self, other):
        return self._with(other, arith.addi, arith.addf)

    def __sub__(self, other):
        return self._with(other, arith.subi, arith.subf)

    def __rsub__(self, other):
        return self._of(other) - self

    def __mul__(self, other):
        return self._with(other, arith.muli, arith.mulf)

    def __and__(self, other):
        return self._with(other, arith.andi)

    def __or__(self, other):
        return self._with(other, arith.ori)

    def __xor__(self, other):
        return self._with(other, arith.xori)

    def __lshift__(self, other):
        return self._with(other, arith.shli)

    def __rshift__(self, other):
        return self._with(other, arith.shrui)

    def __lt__(self, other):
        return self._compare(other, "<")

    def __le__(self, other):
        return self._compare(other, "<=")

    def __gt__(self, other):
        return self._compare(other, ">")

    def __ge__(self, other):
        return self._compare(other, ">=")


class Registers:
    """The lanes of one thread. Float32 arithmetic keeps subnormals and rounds each operation by itself."""

    def uint(self, value: int) -> Lane:
        return Lane(_constant(value, False))

    def real(self, value: float) -> Lane:
        return Lane(_constant(value, True), True)

    def bits(self, x: Lane) -> Lane:
        return Lane(arith.bitcast(_i32(), x.ir))

    def value(self, x: Lane) -> Lane:
        return Lane(arith.bitcast(ir.F32Type.get(), x.ir), True)

    def where(self, condition: Lane, yes: Lane, no: Lane) -> Lane:
        assert yes.real == no.real
        return Lane(arith.select(condition.ir, yes.ir, no.ir), yes.real)

    def equal(self, a: Lane, b: Lane) -> Lane:
        return a._compare(b, "==")

    def both(self, a: Lane, b: Lane) -> Lane:
        return Lane(arith.andi(a.ir, b.ir))

    def largest(self, a: Lane, b: Lane) -> Lane:
        return a._with(b, arith.maxui, arith.maxnumf)

    def smallest(self, a: Lane, b: Lane) -> Lane:
        return a._with(b, arith.minui, arith.minnumf)

    def reciprocal(self, x: Lane) -> Lane:
        return self._ptx("rcp.approx.ftz.f32", x)

    def over_power(self, magnitude: Lane, biased: Lane) -> Lane:
        return self.value(magnitude) * self.value((254 - biased) << 23)

    def power(self, biased: Lane) -> Lane:
        subnormal_or_more = self.where(self.equal(biased, self.uint(0)), self.uint(1 << 22), biased << 23)
        return self.value(
            self.where(self.equal(biased, self.uint(255)), self.uint(0x7FC00000), subnormal_or_more)
        )

    def times_power(self, x: Lane, power: Lane) -> Lane:
        return x * power

    def product_down(self, a: Lane, b: Lane) -> Lane:
        return self._ptx("mul.rz.f32", a, b)

    def lost(self, a: Lane, b: Lane, product: Lane) -> Lane:
        negated = self.value(self.bits(product) ^ 0x80000000)
        return self._ptx("fma.rn.f32", a, b, negated)._compare(0.0, "!=")

    def round_half_up(self, a: Lane, b: Lane) -> Lane:
        # the sum's last place is 1/2: rounding down leaves floor(2 a b + 1) / 2
        halves = self.smallest(
            self._ptx("fma.rz.f32", a, b, self.real(2.0**22 + 0.5)), self.real(2.0**22 + 7.5)
        )
        return self.value(self.bits(halves) & 0xFFFFFFFE) - 2.0**22

    def _ptx(self, instruction: str, *operands: Lane) -> Lane:
        """An instruction on float32 registers."""
        places = ", ".join(f"${i}" for i in range(len(operands) + 1))
        inputs = [operand.ir for operand in operands]
        result = llvm.inline_asm(
            ir.F32Type.get(), inputs, f"{instruction} {places};", "=f" + ",f" * len(inputs)
        )
        return Lane(result, True)

    # ---- between lanes ---------------------------------------------------------------------------
    def thread(self) -> Lane:
        """Number of this thread in its block."""
        return Lane(arith.index_cast(_i32(), gpu.thread_id(gpu.Dimension.x)))

    def block(self) -> Lane:
        """Number of this block in the grid."""
        return Lane(arith.index_cast(_i32(), gpu.block_id(gpu.Dimension.x)))

    def from_lane(self, x: Lane, distance: int) -> Lane:
        """The register of the lane whose number differs in the bit `distance`."""
        return Lane(mu.shfl_bfly(x.ir, distance))

    def largest_of_warp(self, x: Lane) -> Lane:
        """The largest uint32 of the 32 lanes."""
        return Lane(mu.redux(x.ir, _constant(0xFFFFFFFF, False), mu.ReductionKind.UMAX))

    def largest_of_block(self, x: Lane, scratch: Any, warps: int, which: int) -> Lane:
        """The largest of what the warps hold, the same in its lanes; row `which` of scratch [2, 32]."""
        index = ir.IndexType.get()
        thread, row = self.thread(), arith.constant(index, which)
        warp = arith.index_cast(index, (thread >> 5).ir)
        memref.store(x.ir, scratch, [row, warp])
        gpu.barrier()
        lane = self.smallest(thread & 31, self.uint(warps - 1))
        held = memref.load(scratch, [row, arith.index_cast(index, lane.ir)])
        return self.largest_of_warp(Lane(held))

    def largest_halves(self, a: Lane, b: Lane) -> Lane:
        """The larger of the lower and of the upper halves."""
        return Lane(llvm.inline_asm(_i32(), [a.ir, b.ir], "max.u16x2 $0, $1, $2;", "=r,r,r"))

    def halves_to_word(self, low: Lane, high: Lane) -> Lane:
        """The upper halves of two registers, the first one below."""
        return Lane(mu.prmt(low.ir, high.ir, _constant(0x7632, False)))

    # ---- memory ----------------------------------------------------------------------------------
    def load(self, ref: Any, index: Lane, count: int, valid: Lane | None) -> list[Lane]:
        """`count` consecutive words at a word index; zeros where not valid."""
        if valid is not None:
            index = self.where(valid, index, self.uint(0))
        words = []
        for start in range(0, count, 4):
            size = min(4, count - start)
            pointer = self._pointer(ref, index + start)
            loaded = llvm.load(ir.VectorType.get((size,), _i32()), pointer, alignment=4 * size)
            words += [Lane(_extract(loaded, i)) for i in range(size)]
        return words if valid is None else [self.where(valid, word, self.uint(0)) for word in words]

    def store(self, ref: Any, index: Lane, words: list[Lane], valid: Lane | None) -> None:
        """Writes consecutive words where valid."""
        if valid is not None:
            branch = scf.IfOp(valid.ir)
            with ir.InsertionPoint(branch.then_block):
                self.store(ref, index, words, None)
                scf.yield_([])
            return
        for start in range(0, len(words), 4):
            part = [word.ir for word in words[start : start + 4]]
            packed = vector.from_elements(ir.VectorType.get((len(part),), _i32()), part)
            llvm.store(packed, self._pointer(ref, index + start), alignment=4 * len(part))

    def _pointer(self, ref: Any, index: Lane) -> ir.Value:
        wide = arith.extui(ir.IntegerType.get_signless(64), index.ir)
        return mu.getelementptr(mu.memref_ptr(ref), [wide], _i32())


def _extract(loaded: ir.Value, position: int) -> ir.Value:
    at = ir.DenseI64ArrayAttr.get([position])
    return vector.extract(loaded, dynamic_position=[], static_position=at)
