//! The engine: a request table, page tables, and one plan for every step.

use std::error::Error;

use mstar_attn_mla::{
    Capacity, Inputs, Outputs, PageTable, Plan, PlanOptions, Stream, TensorMut, TensorRef, Workspace, run,
};

use crate::model::{C, E, HEADS, PAGE_SIZE, geometry, latent, query, variant};
use crate::plain;
use crate::pool::{PAGES, Pool};

/// Requests that run at once.
const MAX_ROWS: usize = 4;
/// Query tokens of a step: every running request's one, or a chunk of a prompt.
const MAX_TOKENS: usize = 48;

/// One request: what it still has to do, and where its latents lie.
struct Request {
    id: usize,
    /// Tokens of prompt and answer together.
    length: usize,
    prompt: usize,
    stored: usize,
    pages: Vec<i32>,
}

/// What a step was.
pub struct Stepped {
    pub rows: usize,
    /// The largest difference from the plain loop.
    pub worst: f64,
}

pub struct Engine {
    pool: Pool,
    running: Vec<Request>,
    arrived: usize,
    plan: Plan,
    options: PlanOptions,
    workspace: Workspace,
}

/// The field's arrays, of one step.
#[derive(Default)]
struct Table {
    qo_indptr: Vec<i32>,
    kv_indptr: Vec<i32>,
    kv_indices: Vec<i32>,
    kv_last_page_len: Vec<i32>,
}

impl Table {
    fn new() -> Table {
        Table { qo_indptr: vec![0], kv_indptr: vec![0], ..Table::default() }
    }

    fn push(&mut self, request: &Request, queries: usize) {
        self.qo_indptr.push(self.qo_indptr[self.qo_indptr.len() - 1] + queries as i32);
        self.kv_indices.extend(&request.pages);
        self.kv_indptr.push(self.kv_indices.len() as i32);
        let full = request.pages.len().saturating_sub(1) * PAGE_SIZE;
        self.kv_last_page_len.push((request.stored - full) as i32);
    }

    fn view(&self) -> PageTable<'_> {
        PageTable {
            qo_indptr: &self.qo_indptr,
            kv_indptr: &self.kv_indptr,
            kv_indices: &self.kv_indices,
            kv_last_page_len: &self.kv_last_page_len,
            num_pages: PAGES,
            ..PageTable::default()
        }
    }
}

impl Engine {
    pub fn new() -> Result<Engine, Box<dyn Error>> {
        let capacity = Capacity { rows: MAX_ROWS, tokens: MAX_TOKENS, pages: MAX_ROWS * PAGES };
        let options = PlanOptions { capacity: Some(capacity), ..PlanOptions::default() };
        // A plan of no rows at first: every later one is made in its memory.
        let plan = Plan::new(&geometry(), &variant(), &Table::new().view(), &options)?;
        let workspace = Workspace::for_plan(&plan)?;
        Ok(Engine { pool: Pool::new(), running: Vec::new(), arrived: 0, plan, options, workspace })
    }

    pub fn has_room(&self) -> bool {
        self.running.len() < MAX_ROWS && self.pool.free_pages() >= 2
    }

    pub fn arrive(&mut self, prompt: usize, generated: usize) {
        let length = prompt + generated;
        self.running.push(Request { id: self.arrived, length, prompt, stored: 0, pages: Vec::new() });
        self.arrived += 1;
    }

    /// One forward of one layer over all that run; `None` when none does.
    pub fn step(&mut self) -> Result<Option<Stepped>, Box<dyn Error>> {
        if self.running.is_empty() {
            return Ok(None);
        }
        let mut budget = MAX_TOKENS;
        let (mut table, mut tokens) = (Table::new(), Vec::new());
        for request in &mut self.running {
            let left = request.prompt.saturating_sub(request.stored).max(1);
            let queries = left.min(budget).min(request.length - request.stored);
            let queries = append(&mut self.pool, request, queries);
            budget -= queries;
            tokens.extend((request.stored - queries..request.stored).map(|at| (request.id, at)));
            table.push(request, queries);
        }
        if tokens.is_empty() {
            return Err("the pool is too small for what runs".into());
        }
        self.plan.replan(&geometry(), &variant(), &table.view(), &self.options)?;
        self.workspace.reserve(&self.plan)?;
        let rows = self.running.len();
        let worst = self.attend(&tokens)?;
        let pool = &mut self.pool;
        self.running.retain_mut(|request| {
            let goes_on = request.stored < request.length;
            if !goes_on {
                pool.give_back(request.pages.drain(..));
            }
            goes_on
        });
        Ok(Some(Stepped { rows, worst }))
    }

    /// Runs the plan over queries of these (request, position) tokens, and compares with the plain loop.
    fn attend(&mut self, tokens: &[(usize, usize)]) -> Result<f64, Box<dyn Error>> {
        // The fixed shape: tokens past the batch's are padding, whatever they hold.
        let width = C + E;
        let mut q = vec![f32::NAN; MAX_TOKENS * HEADS * width];
        for (t, &(request, position)) in tokens.iter().enumerate() {
            for head in 0..HEADS {
                let at = (t * HEADS + head) * width;
                q[at..at + width].copy_from_slice(&query(request, position, head));
            }
        }
        let (mut o, mut lse) = (vec![f32::NAN; MAX_TOKENS * HEADS * C], vec![f32::NAN; MAX_TOKENS * HEADS]);
        // Both parts of a query lie in one row, as a fused projection leaves them.
        let part = |from: usize, lanes| {
            let strides = [HEADS * width, width, 1];
            TensorRef::from_slice_strided(&q[from..], &[MAX_TOKENS, HEADS, lanes], &strides)
        };
        run(
            &self.plan,
            &Stream::cpu(),
            &mut self.workspace,
            Inputs { q_nope: part(0, C)?, q_pe: part(C, E)?, latent: self.pool.view()? },
            Outputs {
                o: TensorMut::from_slice(&mut o, &[MAX_TOKENS, HEADS, C])?,
                lse: Some(TensorMut::from_slice(&mut lse, &[MAX_TOKENS, HEADS])?),
            },
        )?;
        let mut worst = 0f64;
        for (t, &(request, position)) in tokens.iter().enumerate() {
            let (want_o, want_lse) = plain::attention(request, position);
            let got = o[t * HEADS * C..].iter().zip(&want_o).chain(lse[t * HEADS..].iter().zip(&want_lse));
            for (&got, want) in got {
                let difference = (f64::from(got) - want).abs();
                // A NaN is the worst of all, and no comparison says so.
                worst = if difference.is_nan() { f64::INFINITY } else { worst.max(difference) };
            }
        }
        let padded = tokens.len()..MAX_TOKENS;
        if padded.clone().any(|t| o[t * HEADS * C..(t + 1) * HEADS * C].iter().any(|&x| x != 0.0))
            || padded.clone().any(|t| lse[t * HEADS..(t + 1) * HEADS].iter().any(|&x| x != f32::NEG_INFINITY))
        {
            return Err("padding should yield 0 and -inf".into());
        }
        Ok(worst)
    }

    /// Every page must be free again.
    pub fn check_pool(&self) -> Result<(), Box<dyn Error>> {
        match self.pool.free_pages() {
            PAGES => Ok(()),
            free => Err(format!("{free} of {PAGES} pages are free at the end").into()),
        }
    }
}

/// Writes up to `wanted` more tokens of a request, as many as there are pages for; says how many.
fn append(pool: &mut Pool, request: &mut Request, wanted: usize) -> usize {
    for written in 0..wanted {
        let slot = request.stored % PAGE_SIZE;
        if slot == 0 {
            let Some(page) = pool.take() else { return written };
            request.pages.push(page);
        }
        let page = request.pages[request.pages.len() - 1];
        pool.write(page, slot, &latent(request.id, request.stored));
        request.stored += 1;
    }
    wanted
}
