//! What was put into streams and has not run. A stream runs in order; streams know of each other only by events, and run as late
//! as they may: who waits for one runs that one and what it waits for, and nothing else.

use std::collections::{HashSet, VecDeque};

use super::Handle;
use super::work::Work;

/// Work in its stream; a number says when it was put in.
pub(super) struct Item {
    pub(super) number: u64,
    pub(super) stream: Handle,
    pub(super) work: Work,
}

/// What waits, and what runs now on some thread of the host.
#[derive(Default)]
pub(super) struct Queue {
    waiting: VecDeque<Item>,
    running: Vec<(u64, Handle)>,
    last: u64,
}

/// Numbers of what somebody waits for.
pub(super) type Numbers = HashSet<u64>;

/// What is to be done for one who waits.
#[expect(clippy::large_enum_variant, reason = "moved once, from the queue to whoever runs it")]
pub(super) enum Next {
    /// Run this, and say so by [`Queue::done`].
    Run(Item),
    /// Others run what is left: wait until one of them is done.
    Wait,
    /// All of it has run.
    Nothing,
}

impl Queue {
    /// Puts work in; its number.
    pub(super) fn push(&mut self, stream: Handle, work: Work) -> u64 {
        self.last += 1;
        self.waiting.push_back(Item { number: self.last, stream, work });
        self.last
    }

    /// Pieces of work that wait.
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether a piece of work has not run.
    pub(super) fn is_pending(&self, number: u64) -> bool {
        self.running.iter().any(|&(of, _)| of == number)
            || self.waiting.binary_search_by_key(&number, |item| item.number).is_ok()
    }

    /// Whether a stream has work that has not run.
    pub(super) fn is_busy(&self, stream: Handle) -> bool {
        self.running.iter().any(|&(_, of)| of == stream)
            || self.waiting.iter().any(|item| item.stream == stream)
    }

    /// All that has not run.
    pub(super) fn all(&self) -> Numbers {
        self.waiting.iter().map(|item| item.number).chain(self.running.iter().map(|&(of, _)| of)).collect()
    }

    /// What has not run of a stream, and of others up to where it waits for them.
    pub(super) fn of_stream(&self, stream: Handle) -> Numbers {
        self.needed(vec![stream], HashSet::new())
    }

    /// What has not run up to a piece of work, and of others up to where it waits for them.
    pub(super) fn up_to(&self, number: u64) -> Numbers {
        self.needed(Vec::new(), HashSet::from([number]))
    }

    fn needed(&self, mut streams: Vec<Handle>, mut marks: HashSet<u64>) -> Numbers {
        let mut needed = Numbers::new();
        for Item { number, stream, work } in self.waiting.iter().rev() {
            if marks.contains(number) && !streams.contains(stream) {
                streams.push(*stream);
            }
            if streams.contains(stream) {
                needed.insert(*number);
                if let Work::Wait { mark } = work {
                    marks.insert(*mark);
                }
            }
        }
        let running =
            self.running.iter().filter(|(number, of)| streams.contains(of) || marks.contains(number));
        needed.extend(running.map(|&(number, _)| number));
        needed
    }

    /// Whether a function of the host is among `numbers`.
    pub(super) fn calls_the_host(&self, numbers: &Numbers) -> bool {
        let calls = |item: &Item| matches!(item.work, Work::Call { .. }) && numbers.contains(&item.number);
        self.waiting.iter().any(calls) || self.running.iter().any(|(number, _)| numbers.contains(number))
    }

    /// The next of `numbers` that may run: the first of its stream, behind what it waits for.
    pub(super) fn next(&mut self, numbers: &Numbers) -> Next {
        let mut held: Vec<Handle> = self.running.iter().map(|&(_, stream)| stream).collect();
        let mut left = self.running.iter().any(|(number, _)| numbers.contains(number));
        for at in 0..self.waiting.len() {
            let Item { number, stream, work } = &self.waiting[at];
            if !numbers.contains(number) {
                continue;
            }
            left = true;
            let waits = matches!(work, Work::Wait { mark } if self.is_pending(*mark));
            if waits || held.contains(stream) {
                held.push(*stream);
                continue;
            }
            let item = self.waiting.remove(at).expect("the index is in range");
            self.running.push((item.number, item.stream));
            return Next::Run(item);
        }
        if left { Next::Wait } else { Next::Nothing }
    }

    /// Says that what [`Queue::next`] gave has run.
    pub(super) fn done(&mut self, number: u64) {
        self.running.retain(|&(of, _)| of != number);
    }

    /// Takes out the frees that nothing is before but marks and waits for what has run, as a device gets on by itself.
    pub(super) fn frees_that_are_due(&mut self, mut free: impl FnMut(usize), mut passed: impl FnMut(Handle)) {
        let freeing: Vec<Handle> =
            self.waiting.iter().filter(|i| matches!(i.work, Work::Free { .. })).map(|i| i.stream).collect();
        let mut held: Vec<Handle> = self.running.iter().map(|&(_, stream)| stream).collect();
        let mut at = 0;
        while at < self.waiting.len() {
            let Item { stream, work, .. } = &self.waiting[at];
            let (stream, due) = (
                *stream,
                match work {
                    Work::Free { .. } | Work::Record { .. } => true,
                    Work::Wait { mark } => !self.is_pending(*mark),
                    _ => false,
                },
            );
            if !freeing.contains(&stream) || held.contains(&stream) || !due {
                held.push(stream);
                at += 1;
                continue;
            }
            match self.waiting.remove(at).expect("the index is in range").work {
                Work::Free { at } => free(at),
                Work::Record { event } => passed(event),
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(number: usize) -> Handle {
        Handle(number as *mut std::ffi::c_void)
    }

    fn sorted(numbers: Numbers) -> Vec<u64> {
        let mut all: Vec<u64> = numbers.into_iter().collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn who_waits_for_a_stream_runs_it_and_what_it_waits_for() {
        let (a, b, c) = (stream(1), stream(2), stream(3));
        let mut queue = Queue::default();
        let fill = || Work::Fill { dst: 0, value: 0, bytes: 0 };
        let first = queue.push(a, fill());
        let mark = queue.push(a, Work::Record { event: stream(9) });
        let behind = queue.push(a, fill());
        let other = queue.push(c, fill());
        let wait = queue.push(b, Work::Wait { mark });
        let last = queue.push(b, fill());
        assert_eq!(sorted(queue.of_stream(b)), [first, mark, wait, last]);
        assert_eq!(sorted(queue.of_stream(a)), [first, mark, behind]);
        assert_eq!(sorted(queue.up_to(mark)), [first, mark]);
        assert_eq!(queue.all().len(), 6);
        let needed = queue.of_stream(b);
        let mut order = Vec::new();
        loop {
            match queue.next(&needed) {
                Next::Run(item) => {
                    queue.done(item.number);
                    order.push(item.number);
                }
                Next::Wait => panic!("nobody else runs anything"),
                Next::Nothing => break,
            }
        }
        assert_eq!(order, [first, mark, wait, last]);
        assert!(queue.is_pending(behind) && queue.is_busy(c) && queue.is_pending(other) && !queue.is_busy(b));
    }

    #[test]
    fn what_runs_holds_its_stream_and_who_waits_for_it() {
        let (a, b) = (stream(1), stream(2));
        let mut queue = Queue::default();
        let mark = queue.push(a, Work::Record { event: stream(9) });
        queue.push(b, Work::Wait { mark });
        let freed = queue.push(b, Work::Free { at: 77 });
        let Next::Run(item) = queue.next(&queue.all()) else { panic!("the mark is the first") };
        assert!(matches!(queue.next(&queue.of_stream(b)), Next::Wait));
        let mut due = Vec::new();
        queue.frees_that_are_due(|at| due.push(at), |_| ());
        assert_eq!(due, [], "what is waited for runs still");
        queue.done(item.number);
        queue.frees_that_are_due(|at| due.push(at), |_| ());
        assert_eq!((due, queue.is_pending(freed)), (vec![77], false));
    }
}
