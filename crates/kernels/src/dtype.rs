//! Element types, as run-time values and as Rust types.

use std::fmt;

/// The run-time element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// bfloat16: eight exponent bits, seven stored mantissa bits.
    Bf16,
    /// IEEE half precision.
    F16,
    /// OCP OFP8 "E4M3" codes, one byte each: four exponent bits, three mantissa bits, no infinity. What a code stands for takes
    /// the scale that is kept beside it: see [`fp8`](crate::fp8).
    E4m3,
    /// Unsigned bytes: masks, quantised planes, scales.
    U8,
    /// Signed 32-bit integers: page tables and positions.
    I32,
    /// Signed 64-bit integers: slots of a cache.
    I64,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::U8 | DType::E4m3 => 1,
            DType::Bf16 | DType::F16 => 2,
            DType::F32 | DType::I32 => 4,
            DType::I64 => 8,
        }
    }

    /// Whether the type holds floating-point numbers that stand for themselves; [`DType::E4m3`] needs a scale, so it does not.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::Bf16 | DType::F16)
    }

    /// The name used in specs, reports and messages: `f32`, `bf16`, `f16`, `fp8_e4m3`, `u8`, `i32`, `i64`.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::E4m3 => "fp8_e4m3",
            DType::U8 => "u8",
            DType::I32 => "i32",
            DType::I64 => "i64",
        }
    }

    /// The type called `name`, if there is one.
    pub fn parse(name: &str) -> Option<DType> {
        [DType::F32, DType::Bf16, DType::F16, DType::E4m3, DType::U8, DType::I32, DType::I64]
            .into_iter()
            .find(|dtype| dtype.name() == name)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A Rust type that can be an element of a tensor.
pub trait Element: bytemuck::Pod + Send + Sync + 'static {
    /// The run-time value for this type.
    const DTYPE: DType;
}

macro_rules! element {
    ($($t:ty => $d:ident),* $(,)?) => { $(impl Element for $t { const DTYPE: DType = DType::$d; })* };
}
element! { f32 => F32, half::bf16 => Bf16, half::f16 => F16, u8 => U8, i32 => I32, i64 => I64 }
