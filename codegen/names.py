"""Legal names of kernels; each name is a symbol of its source."""

from __future__ import annotations

import re

from codegen.errors import SpecError
from codegen.wording import shown

# A kernel's name is a symbol of its source, and these names are reserved there. Rendering finds conflicts with names
# that only some sources use.
_KEYWORDS = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class co_await
co_return co_yield compl concept const const_cast consteval constexpr constinit continue decltype default delete do
double dynamic_cast else enum explicit export extern false float for friend goto if inline int long main mutable
namespace new noexcept not not_eq nullptr operator or or_eq private protected public register reinterpret_cast requires
return short signed sizeof static static_assert static_cast struct switch template this thread_local throw true try
typedef typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq
"""
# Names that NVRTC defines itself or in cuda_fp16.h, cuda_bf16.h and mma.h, and a word of PTX.
_CUDA_NAMES = """
CUuuid MAJOR_VERSION MINOR_VERSION NULL PATCH_LEVEL WARP_SZ abs assert blockDim blockIdx clock64 clock_t dim3 free
gridDim half half2 labs libraryPropertyType llabs llmax llmin malloc max min nv_bfloat16 nv_bfloat162 nv_half nv_half2
nvcuda printf ptrdiff_t size_t std threadIdx ullmax ullmin umax umin va_arg va_copy va_end va_list va_start warpSize
wmma
"""
_FUNCTIONS = """
acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh cospi cyl_bessel_i0 cyl_bessel_i1 erf erfc erfcinv
erfcx erfinv exp exp10 exp2 expm1 fabs fdim fdivide floor fma fmax fmin fmod frexp hypot ilogb j0 j1 jn ldexp lgamma
llrint llround log log10 log1p log2 logb lrint lround modf nan nearbyint nextafter norm norm3d norm4d normcdf normcdfinv
pow rcbrt remainder remquo rhypot rint rnorm rnorm3d rnorm4d round rsqrt scalbln scalbn sin sincos sincospi sinh sinpi
sqrt tan tanh tgamma trunc y0 y1 yn
"""
CPP_WORDS = frozenset(
    (_KEYWORDS + _CUDA_NAMES + _FUNCTIONS).split() + [f"{name}f" for name in _FUNCTIONS.split()]  # for floats
)
RESERVED = re.compile(r"k[A-Z].*|_([A-Z_].*)?|(cuda[A-Z]|CUDA|CU_|NV_).*")
"""Our constants, names reserved for C++ compilers (``_`` alone is PTX's), and names of CUDA's headers."""


def check_name(stem: str) -> None:
    """Reject an invalid name of a kernel.

    Raises:
        SpecError: for a name that is not a C identifier, or is reserved in CUDA C++.
    """
    if not (stem.isidentifier() and stem.isascii()):
        raise SpecError("", f"{shown(stem)} names the kernel, so it must be a C identifier")
    if stem in CPP_WORDS or RESERVED.fullmatch(stem):
        raise taken(stem)


def taken(stem: str) -> SpecError:
    """Error for a kernel's name that conflicts with its source."""
    return SpecError(
        "", f"{shown(stem)} names the kernel, but is reserved in CUDA C++ or in the source: use another name"
    )
