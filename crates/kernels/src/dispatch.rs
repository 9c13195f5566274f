//! From a checked call over a work list to whoever executes it: the host's threads or a device's blocks.

#[cfg(feature = "cuda")]
use crate::Device;
use crate::cpu::paged::Call;
use crate::paged::Target;
use crate::{DType, Error, Result, Stream, TensorMut, TensorRef};

/// Numbers of a call, one a head, which the host and a device read in different ways.
#[derive(Clone, Copy, Default)]
pub(crate) struct HeadValues<'a> {
    /// `[H]` f32.
    pub(crate) sinks: Option<TensorRef<'a>>,
    /// `[H]` f32.
    pub(crate) alibi_slopes: Option<TensorRef<'a>>,
}

/// Bytes that a run over a list needs with up to `workers` threads, wherever its workspace starts.
pub(crate) fn workspace_bytes(work: &crate::work::WorkList, workers: usize) -> usize {
    crate::cpu::paged::workspace_bytes(work, workers).saturating_add(63)
}

/// Runs a checked call where its stream is. Nothing is written when it is refused.
///
/// # Errors
/// A list that was cut for another kind of device, or not staged; a workspace that is too small, elsewhere or of another type.
pub(crate) fn attend<'a>(
    stream: &Stream,
    mut call: Call<'a>,
    values: HeadValues<'a>,
    mut workspace: TensorMut<'_>,
    workers: usize,
) -> Result<()> {
    let device = stream.device();
    workspace.expect("workspace", "[n]", &[None], Some(DType::U8), device)?;
    let (available, needed) = (workspace.numel(), workspace_bytes(call.work, workers));
    if available < needed {
        return Err(Error::Workspace { needed, available });
    }
    #[cfg(feature = "cuda")]
    if device != Device::Cpu {
        let numbers = crate::cuda::exec::Numbers { sinks: values.sinks, slopes: values.alibi_slopes };
        return crate::cuda::exec::attend(stream, &call, numbers, &mut workspace);
    }
    if call.work.target != Target::of(device) {
        let why = "the list was cut for a device's blocks; plan it with the CPU in its options".into();
        return Err(Error::Parameter { name: "work", why, got: format!("a run on {device}") });
    }
    let slice = |tensor: TensorRef<'a>| tensor.as_slice::<f32>().expect("one contiguous f32 axis on the CPU");
    (call.sinks, call.alibi_slopes) = (values.sinks.map(slice), values.alibi_slopes.map(slice));
    let Some(memory) = workspace.as_mut_slice::<u8>() else {
        return Err(Error::Workspace { needed, available });
    };
    let skip = memory.as_ptr().align_offset(64);
    crate::cpu::paged::run(&call, &mut memory[skip..], workers);
    Ok(())
}
