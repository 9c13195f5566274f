//! A list on a device: staging it, and running one layer over it.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

use bytemuck::Pod;

use crate::cpu::paged::Call;
use crate::cuda::jit::{self, Key, Unit};
use crate::cuda::launch::launch_next;
use crate::cuda::{Context, Function, Launch, launch};
use crate::paged::{Stored, Target, cut_tokens};
use crate::staged::Staged;
use crate::work::WorkList;
use crate::{Device, Error, Result, Stream, TensorMut, TensorRef};

use super::image::Layout;
use super::params::{
    ALIGNED, Attend, AttendBoxes, AttendMapped, CAUSAL, MAPPED, Maps, PER_HEAD, PREFIX_PAGES, Place, View,
    Walk,
};
use super::tickets::Tickets;
use super::{Choice, heads, latents, merge, mods, plain};

/// What a device has of a work list. A copy of a list has nothing on a device.
#[derive(Default)]
pub(crate) struct StagedList(Option<Box<OnDevice>>);

impl Clone for StagedList {
    fn clone(&self) -> StagedList {
        StagedList(None)
    }
}

impl fmt::Debug for StagedList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let current = self.0.as_ref().filter(|on| on.current);
        f.debug_tuple("StagedList").field(&current.map(|on| on.image.device())).finish()
    }
}

impl StagedList {
    /// What a captured run takes for granted; `None` while the device has no list.
    pub(crate) fn capture_key(&self) -> Option<u64> {
        let on = self.0.as_ref().filter(|on| on.current)?;
        let mut hasher = DefaultHasher::new();
        on.image.address().addr().hash(&mut hasher);
        on.tickets.address().hash(&mut hasher);
        for ready in [&on.few, &on.many, &on.merge] {
            let launch = ready
                .as_ref()
                .map(|ready| (ready.key.to_string(), ready.threads, ready.shared, ready.walk, ready.blocks));
            launch.hash(&mut hasher);
        }
        (on.empties, if on.empties { 0 } else { on.open_blocks }).hash(&mut hasher);
        Some(hasher.finish())
    }

    /// The list is made anew: what the device has of it is of no use until it is staged again.
    pub(crate) fn forget(&mut self) {
        if let Some(on) = &mut self.0 {
            (on.current, on.renewed) = (false, None);
        }
    }

    /// The list has other rows, and other page ids or the same, and is else as it was.
    #[cfg(any(feature = "paged", feature = "mla"))]
    pub(crate) fn renewed(&mut self, pages: bool) {
        if let Some(on) = &mut self.0 {
            // What was not staged yet is still to be staged whole.
            on.renewed = if on.current { Some(pages) } else { on.renewed.map(|before| before || pages) };
            on.current = false;
        }
    }
}

struct OnDevice {
    image: Staged,
    /// Whether the image is that of the list as it is.
    current: bool,
    /// Whether only rows tell the two apart, and if so whether page ids do too.
    renewed: Option<bool>,
    mods: mods::Staged,
    few: Option<Ready>,
    many: Option<Ready>,
    merge: Option<Ready>,
    /// Blocks of the merge where the decode kernel has done the others.
    open_blocks: u32,
    /// Whether what merges there are, but for those that the decode kernel does, have no parts, and the kernel of few query vectors
    /// can do them: of rows that see nothing, such as those of padding.
    empties: bool,
    tickets: Tickets,
}

/// A kernel that is loaded, and how it is launched.
struct Ready {
    key: Key,
    function: Function,
    threads: u32,
    shared: u32,
    /// Blocks that the device holds at once, whole clusters of them.
    most_blocks: u32,
    /// [`Attend::walk`].
    walk: u32,
    /// Blocks that a launch has.
    blocks: u32,
}

impl Ready {
    fn of(choice: &Choice, device: Device, context: &Context) -> Result<Ready> {
        let function = jit::function(device, &choice.key)?;
        let each = function.blocks_per_sm(choice.threads, choice.shared)?;
        if each == 0 {
            let (threads, shared) = (choice.threads, choice.shared);
            let why =
                format!("a block of {threads} threads and {shared} bytes does not fit on a multiprocessor");
            return Err(Error::Kernel { kernel: choice.key.to_string(), why });
        }
        let cluster = function.attributes()?.cluster;
        Ok(Ready {
            key: choice.key.clone(),
            function,
            threads: choice.threads,
            shared: choice.shared,
            most_blocks: (each * context.sm_count()).max(cluster) / cluster * cluster,
            walk: 0,
            blocks: 0,
        })
    }

    /// Launches so many blocks; `next` of a call's earlier kernels, of which it says then that there is one.
    fn launch(&self, stream: &Stream, params: &AttendBoxes, blocks: u32, next: &mut bool) -> Result<()> {
        if heads::takes_maps(&self.key) {
            let attend = Attend { walk: self.walk, ..params.attend };
            return self.put(stream, &AttendBoxes { attend, ..*params }, blocks, next);
        }
        let attend = Attend { walk: self.walk, ..params.attend };
        if latents::takes_a_map(&self.key) {
            let mapped = AttendMapped { attend, map: params.maps.keys, ..AttendMapped::default() };
            return self.put(stream, &mapped, blocks, next);
        }
        self.put(stream, &attend, blocks, next)
    }

    /// The same of the parameter that the kernel takes: an `Attend`, or one with maps.
    fn put<P: Pod>(&self, stream: &Stream, params: &P, blocks: u32, next: &mut bool) -> Result<()> {
        if blocks == 0 {
            return Ok(());
        }
        let how = Launch { grid: [blocks, 1, 1], block: self.threads, shared: self.shared };
        // SAFETY: the kernel takes a `P`, whose addresses `attend` checked: tensors of the list's shapes on this device, an image that is
        // in range because the list is, and a workspace with room for its states.
        unsafe {
            if std::mem::replace(next, true) {
                launch_next(&self.function, stream, how, params)
            } else {
                launch(&self.function, stream, how, params)
            }
        }
    }
}

/// Stages a list that knows no mods. Nothing is done for a list that is staged as it is.
///
/// # Errors
/// A list cut for threads; a kernel that cannot be built; memory that cannot be had.
pub(crate) fn stage(work: &mut WorkList, stream: &Stream) -> Result<()> {
    stage_with(work, stream, None)
}

/// Stages a list over blocks, with the mods of the calls over it.
///
/// # Errors
/// As [`stage`]; mods that have no half for devices.
#[cfg(feature = "flex")]
pub(crate) fn stage_blocks(
    work: &mut WorkList,
    stream: &Stream,
    scores: &[crate::flex::ScoreMod<'_>],
    masks: &[crate::flex::MaskMod<'_>],
) -> Result<()> {
    let before = work.staged.0.as_ref().filter(|on| on.mods.are(scores, masks));
    let mods = match before {
        Some(_) => None,
        None => Some(mods::Staged::of(stream.device(), scores, masks)?),
    };
    stage_with(work, stream, mods)
}

fn stage_with(work: &mut WorkList, stream: &Stream, mods: Option<mods::Staged>) -> Result<()> {
    let device = stream.device();
    if work.target != Target::Blocks {
        let why = "the list was cut for threads; plan it with the device in its options".into();
        return Err(Error::Parameter { name: "work", why, got: format!("a stream of {device}") });
    }
    let mut on = work.staged.0.take().filter(|on| on.image.device() == device);
    if mods.is_none() && on.as_ref().is_some_and(|on| on.current) {
        work.staged.0 = on;
        return Ok(());
    }
    let staged = match &mut on {
        Some(on) => on,
        None => on.insert(Box::new(OnDevice {
            image: Staged::with_capacity(stream, 0)?,
            current: false,
            renewed: None,
            mods: mods::Staged::default(),
            few: None,
            many: None,
            merge: None,
            open_blocks: 0,
            empties: false,
            tickets: Tickets::default(),
        })),
    };
    if let Some(mods) = mods {
        staged.mods = mods;
        staged.renewed = None;
    }
    staged.current = false;
    let done = match staged.renewed.take() {
        Some(pages) => staged.renew(work, stream, pages),
        None => staged.make(work, stream),
    };
    if let Some(on) = &mut on {
        on.current = done.is_ok();
    }
    work.staged.0 = on;
    done
}

impl OnDevice {
    /// Has the kernels ready and the image on its way.
    fn make(&mut self, work: &WorkList, stream: &Stream) -> Result<()> {
        let device = stream.device();
        self.choose(work, Context::of(device)?, device)?;
        let turns = self.many.as_ref().is_some_and(|many| heads::takes_turns(&many.key));
        let tickets = if work.fixed { Layout::most_tickets(work) } else { work.tickets };
        self.tickets.reserve(device, tickets.max(turns.into()))?;
        if !work.fixed {
            self.tickets.release();
        }
        // A block looks for its first task before it knows how many there are.
        let blocks = self.few.as_ref().map_or(0, |few| few.blocks);
        self.image.reserve(Layout::first_tasks(blocks))?;
        let layout = Layout::of(work, self.mods.tables.len(), self.mods.bytes())?;
        let words_at = layout.bytes();
        let (mods, bytes) = (&self.mods, words_at + self.mods.bytes());
        if work.fixed {
            // A captured run knows this address: it must do for every list to come.
            let lists = Layout::bound(work, cut_tokens(work));
            self.image.reserve(lists + bytes - Layout::of(work, 0, 0)?.bytes())?;
        }
        self.image.set_with(stream, bytes, |to| {
            layout.write(work, mods.tables_at(words_at as u32), to);
            to[words_at..bytes].copy_from_slice(bytemuck::cast_slice(&mods.words));
        })
    }

    /// Has what changed of the image on its way; kernels and grids are those that it had.
    fn renew(&mut self, work: &WorkList, stream: &Stream, pages: bool) -> Result<()> {
        let layout = Layout::of(work, 0, 0)?;
        let bytes = layout.bytes();
        if bytes > self.image.capacity() || !self.mods.tables.is_empty() {
            return self.make(work, stream);
        }
        self.image.set_parts(stream, bytes, &layout.parts(pages), |to| layout.write_rows(work, pages, to))
    }

    /// Chooses, builds and loads the kernels of a list.
    fn choose(&mut self, work: &WorkList, context: &Context, device: Device) -> Result<()> {
        // A captured run goes over lists to come, which may have items of either kind.
        let two = matches!(work.stored, Stored::Heads | Stored::Latents);
        let few = work.few > 0 || work.fixed && two;
        // A mask that changes has items and merges at one time and none at another; what is not needed is not launched.
        let all = work.fixed || work.stored == Stored::Blocks;
        let many = work.items.len() > work.few || all;
        let merged = !work.merges.is_empty() || all;
        let choice = |wanted: bool, walk: Walk| {
            if !wanted {
                return Ok(None);
            }
            match special(work, walk, &self.mods.kinds, context)
                .or_else(|| plain::choose(work, &self.mods.kinds, context))
            {
                Some(choice) => Ok(Some(choice)),
                None => {
                    let geometry = &work.geometry;
                    let why = format!(
                        "no kernel takes keys of width {} with values of width {}",
                        geometry.head_dim_qk, geometry.head_dim_vo
                    );
                    Err(Error::Unsupported { operation: "attention", device, why })
                }
            }
        };
        let few = choice(few, Walk::Few)?;
        if work.tasks.iter().any(|task| task.level > 0)
            && few
                .as_ref()
                .is_some_and(|few| !heads::takes_tasks(&few.key) && few.key.unit.name() != "latent_few.cu")
        {
            let why = "items of several leaves are for a kernel that this device does not run".into();
            return Err(Error::Unsupported { operation: "attention", device, why });
        }
        let many = choice(many, Walk::Many)?;
        let merged = merged.then(|| merge::choose(work));
        let keys = [&few, &many, &merged].map(|choice| choice.as_ref().map(|choice| choice.key.clone()));
        let same =
            |ready: &Option<Ready>, key: &Option<Key>| ready.as_ref().map(|ready| &ready.key) == key.as_ref();
        if !(same(&self.few, &keys[0]) && same(&self.many, &keys[1]) && same(&self.merge, &keys[2])) {
            // Lists to come may have merges of the other kind.
            let both = merged.iter().flat_map(|_| merge::keys(work));
            let keys: Vec<Key> = keys.into_iter().flatten().chain(both).collect();
            jit::prepare(device, &keys)?;
            let ready = |choice: &Option<Choice>| {
                choice.as_ref().map(|choice| Ready::of(choice, device, context)).transpose()
            };
            (self.few, self.many, self.merge) = (ready(&few)?, ready(&many)?, ready(&merged)?);
        }
        // A captured run has as many blocks as the device holds, another no more than it has work for; neither launches what finds
        // nothing to do over pages. Where there is something at another time, that is another captured run: see `capture_key`.
        let pieces = merge::pieces(work);
        let blocks_of = pieces as usize * merge::MORE_PIECES;
        let work_of = [work.few, work.items.len() - work.few, work.merges.len().saturating_mul(blocks_of)];
        let readies = [&mut self.few, &mut self.many, &mut self.merge];
        for ((ready, work_of), walk) in
            readies.into_iter().zip(work_of).zip([Walk::Few as u32, Walk::Many as u32, pieces])
        {
            if let Some(ready) = ready {
                let units = work_of.saturating_mul(latents::pieces(&ready.key));
                let needed = units > 0 || !two || walk == Walk::Few as u32;
                let most = if work.fixed && needed { usize::MAX } else { units };
                let blocks = (ready.most_blocks as usize).min(most);
                (ready.blocks, ready.walk) = (blocks as u32, walk);
            }
        }
        if let Some(merge) = &self.merge {
            let open = (work.merges.len() - work.fused).saturating_mul(blocks_of);
            let whole = work.fixed && (open > 0 || !two);
            self.open_blocks = if whole { merge.blocks } else { merge.blocks.min(open as u32) };
        }
        let open = &work.merges[..work.merges.len() - work.fused];
        self.empties = (work.fixed || !open.is_empty())
            && open.iter().all(|merge| merge.part_count == 0)
            && self.few.as_ref().is_some_and(|few| few.blocks > 0 && leaves_empties(&few.key));
        // One kernel for both kinds goes over all at once.
        if let (Some(few), Some(many)) = (&mut self.few, &mut self.many)
            && few.key == many.key
        {
            let blocks = (few.blocks as usize + many.blocks as usize).min(few.most_blocks as usize);
            (few.blocks, few.walk, many.blocks) = (blocks as u32, Walk::All as u32, 0);
        }
        Ok(())
    }
}

/// The kernel made for a list's kind and shapes, if there is one.
fn special(work: &WorkList, walk: Walk, mods: &mods::Kinds, context: &Context) -> Option<Choice> {
    match work.stored {
        Stored::Latents => latents::choose(work, walk, context),
        Stored::Heads | Stored::Segments | Stored::Blocks => heads::choose(work, walk, mods, context),
    }
}

/// Whether a kernel writes what merges without parts stand for: `leave_empties` in `cu/finish.cuh`.
fn leaves_empties(key: &Key) -> bool {
    [Unit::DECODE, Unit::DECODE_FEW, Unit::LATENT_FEW, Unit::LATENT_WIDE]
        .iter()
        .any(|unit| unit.name() == key.unit.name())
}

/// Per-head numbers of a call on a device: `[H]` f32 each.
#[derive(Clone, Copy, Default)]
pub(crate) struct Numbers<'a> {
    pub(crate) sinks: Option<TensorRef<'a>>,
    pub(crate) slopes: Option<TensorRef<'a>>,
}

/// Runs one layer over a staged list. The call was checked as for the CPU, but for the device of its tensors, which is the
/// stream's; `workspace` starts on 64 bytes and holds the list's partial states.
///
/// # Errors
/// A list that is not staged on the stream's device, or with other mods; what a launch is refused with.
pub(crate) fn attend(
    stream: &Stream,
    call: &Call<'_>,
    numbers: Numbers<'_>,
    workspace: &mut TensorMut<'_>,
) -> Result<()> {
    let work = call.work;
    let refuse = |why: &str| {
        Err(Error::Parameter { name: "work", why: why.into(), got: format!("a run on {}", stream.device()) })
    };
    let Some(on) = work.staged.0.as_ref().filter(|on| on.current && on.image.device() == stream.device())
    else {
        return refuse("the list is not on this device as it is; stage it after planning");
    };
    #[cfg(feature = "flex")]
    if let Some(of) = &call.extra.mods
        && !on.mods.are(of.score, of.mask)
    {
        return refuse("the list was staged with other mods; stage it with those of the call");
    }
    let mut attend = parameters(call, numbers);
    attend.image = on.image.address() as u64;
    attend.partials = (workspace.as_mut_ptr() as u64).next_multiple_of(64);
    let tasks = on.few.as_ref().is_some_and(|few| heads::takes_tasks(&few.key));
    if tasks {
        attend.tickets = on.tickets.of(attend.partials);
    }
    let mut params = AttendBoxes { attend, ..AttendBoxes::default() };
    let any =
        |takes: fn(&Key) -> bool| [&on.few, &on.many].into_iter().flatten().any(|ready| takes(&ready.key));
    let maps = if any(heads::takes_maps) {
        heads::maps(call, Context::of(stream.device())?)?
    } else if any(latents::takes_a_map) {
        let keys = latents::map(&call.k, Context::of(stream.device())?)?;
        keys.map(|keys| (Maps { keys, ..Maps::default() }, 0))
    } else {
        None
    };
    if let Some((maps, slots)) = maps {
        (params.maps, params.slots) = (maps, slots);
        params.attend.flags |= MAPPED;
    }
    if on.many.as_ref().is_some_and(|many| heads::takes_turns(&many.key)) {
        // Without states a workspace may be smaller than what addresses are rounded to: its own is what tells it from others.
        params.turns = on.tickets.of(workspace.as_mut_ptr() as u64);
    }
    let (mut next, alone) = (false, on.empties && (attend.tickets != 0 || !tasks));
    if let Some(few) = &on.few {
        let attend = Attend { empties: alone.into(), ..params.attend };
        few.launch(stream, &AttendBoxes { attend, ..params }, few.blocks, &mut next)?;
    }
    if let Some(many) = &on.many {
        many.launch(stream, &params, many.blocks, &mut next)?;
    }
    match &on.merge {
        Some(_) if alone => Ok(()),
        Some(merge) if attend.tickets != 0 => merge.launch(stream, &params, on.open_blocks, &mut next),
        Some(merge) => merge.launch(stream, &params, merge.blocks, &mut next),
        None => Ok(()),
    }
}

fn parameters(call: &Call<'_>, numbers: Numbers<'_>) -> Attend {
    let (work, geometry, variant) = (call.work, &call.geometry, &call.variant);
    let blocks = &work.blocks;
    let mut aligned = [call.q, call.k, call.v].iter().all(View::aligned);
    if let Some(q_pe) = &call.q_pe {
        aligned &= q_pe.numel() == 0 || View::aligned(q_pe);
    }
    let mut params = Attend {
        q: View::of(&call.q),
        q_pe: call.q_pe.as_ref().map(View::of).unwrap_or_default(),
        k: View::of(&call.k),
        v: View::of(&call.v),
        o: Place::of(&call.o),
        lse: call.lse.as_ref().map(Place::of).unwrap_or_default(),
        max_scores: call.extra.max_scores.as_ref().map(Place::of).unwrap_or_default(),
        sinks: numbers.sinks.map_or(0, |sinks| sinks.as_ptr() as u64),
        slopes: numbers.slopes.map_or(0, |slopes| slopes.as_ptr() as u64),
        window_left: variant.window_left.map_or(-1, |left| left.min(u32::MAX as usize) as i64),
        h: geometry.num_qo_heads as u32,
        g: geometry.num_kv_heads as u32,
        d: geometry.head_dim_qk as u32,
        dv: geometry.head_dim_vo as u32,
        s: geometry.page_size as u32,
        q_len: blocks.q_len as u32,
        kv_len: blocks.kv_len as u32,
        heads: blocks.num_qo_heads as u32,
        kv_heads: blocks.num_kv_heads as u32,
        scale: variant.sm_scale,
        soft_cap: variant.logits_soft_cap.unwrap_or(0.0),
        flags: if variant.causal { CAUSAL } else { 0 },
        ..Attend::default()
    };
    if work.stored == Stored::Blocks && blocks.per_head {
        params.flags |= PER_HEAD;
    }
    if work.stored == Stored::Segments && work.segments.paged {
        params.flags |= PREFIX_PAGES;
    }
    if let Some([k, v]) = &call.extra.scales {
        (params.k_scales, params.v_scales) = (View::strided(k), View::strided(v));
    }
    #[cfg(feature = "dense")]
    if let Some([k, v]) = &call.extra.prefix {
        (params.k_prefix, params.v_prefix) = (View::of(k), View::of(v));
        aligned &= View::aligned(k) && View::aligned(v);
    }
    #[cfg(feature = "flex")]
    if let Some(mods) = &call.extra.mods {
        params.q_offset = mods.q_offset;
    }
    if aligned {
        params.flags |= ALIGNED;
    }
    params
}
