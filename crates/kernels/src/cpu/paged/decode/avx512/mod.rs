//! AVX-512 bodies.
//!
//! | file | what is in it |
//! | --- | --- |
//! | `load` | stored elements as sixteen f32 |
//! | `score` | products of queries and keys |
//! | `softmax` | what becomes of scores |
//! | `value` | weighted values |
//! | `fetch` | lines of what comes next, fetched beside the work |

mod fetch;
mod load;
mod score;
mod softmax;
mod value;

use half::{bf16, f16};

use crate::DType;

use self::score::{scores_bf16, scores_f32};
use self::softmax::{rescale, softmax, transform};
use self::value::values;
use super::body::{Body, ScoresFn, ValuesFn};

/// The body for stored elements of `kv_dtype`; with `dot`, queries are bf16 and multiplied as such.
pub(super) fn body(kv_dtype: DType, dot: bool) -> Body {
    let (scores, values): (ScoresFn, ValuesFn) = match kv_dtype {
        DType::Bf16 if dot => (scores_bf16, values::<bf16>),
        DType::Bf16 => (scores_f32::<bf16>, values::<bf16>),
        DType::F16 => (scores_f32::<f16>, values::<f16>),
        _ => (scores_f32::<f32>, values::<f32>),
    };
    Body { q_bf16: dot, scores, values, transform, softmax, rescale }
}
