//! A case through the wrapper level of sparse attention: packed keys are pages of one slot.

use half::{bf16, f16};
use mstar_dsa::{Buffer, DType, KeyFormat, SelectParams};
use mstar_kernels::Element;
use mstar_kernels::dsa::{DeviceTable, Table, select_at, select_workspace_bytes_on};

use super::Case;
use crate::parity::ops::{Computed, NotRun, Outputs};
use crate::parity::place::Place;

/// What an entry that nobody wrote holds: no position, and no -1 either.
const UNWRITTEN: i32 = i32::MIN;

/// Runs a case.
pub(in crate::parity::ops) fn fast(case: &Case, place: &Place) -> Result<Outputs, NotRun> {
    let picked = match case.dtype {
        DType::Bf16 => picked::<bf16>(case, place),
        DType::F16 => picked::<f16>(case, place),
        _ => picked::<f32>(case, place),
    };
    let picked = picked.map_err(|error| NotRun::Failed(error.to_string()))?;
    Ok(Outputs::from([("out.selection", Computed::Integers(picked))]))
}

fn picked<E: Element>(case: &Case, place: &Place) -> mstar_dsa::Result<Vec<i32>> {
    let [t, hi, di, u, topk] = ["T", "Hi", "Di", "U", "K"].map(|letter| case.letters.get(letter));
    let q = place.put(&case.elements::<E>("in.q"), &[t, hi, di])?;
    let weights = place.put(&case.elements::<f32>("in.weights"), &[t, hi])?;
    let keys = place.put(&case.elements::<E>("in.keys"), &[u, 1, di])?;
    let key_indptr = case.elements::<i32>("in.key_indptr");
    let (row_request, positions) =
        (case.elements::<i32>("in.row_request"), case.elements::<i32>("in.positions"));
    let kv_lens: Vec<i32> = key_indptr.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let pages: Vec<i32> = (0..u as i32).collect();
    let longest = kv_lens.iter().copied().max().unwrap_or(0) as usize;
    let workers = rayon::current_num_threads();
    let (stream, device) = (place.stream(), place.device());
    let page_start = vec![0; kv_lens.len()];
    let mut on = DeviceTable::with_capacity(&stream, t, kv_lens.len(), u, longest)?;
    on.set(
        &stream,
        &Table {
            row_request: &row_request,
            positions: &positions,
            kv_indptr: &key_indptr,
            kv_indices: &pages,
            page_start: &page_start,
            kv_lens: &kv_lens,
        },
    )?;
    let bytes = select_workspace_bytes_on(device, t, longest, hi, di, topk, workers);
    let mut workspace = Buffer::zeroed_on(device, bytes)?;
    let mut selection = place.filled(UNWRITTEN, &[t, topk])?;
    let params = SelectParams {
        q: q.view()?,
        weights: weights.view()?,
        keys: keys.view()?,
        format: KeyFormat::of(E::DTYPE).expect("a case holds f32, bf16 or f16"),
        row_request: &row_request,
        positions: &positions,
        kv_indptr: &key_indptr,
        kv_indices: &pages,
        page_start: &page_start,
        kv_lens: &kv_lens,
        topk,
        selection: selection.view_mut()?,
        workspace: workspace.tensor_mut(0, DType::U8, &[bytes])?,
        workers,
    };
    select_at(&stream, &on, params)?;
    Ok(place.take(&selection, UNWRITTEN)?)
}
