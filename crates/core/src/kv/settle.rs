//! The end of a step: commit, rollback, and the promotion of one that was planned ahead.
#![forbid(unsafe_code)]

use mstar_kernels::mutant::planted;

use super::KvConfig;
use super::events::KvEvent;
use super::ledger::Ledger;
use super::reserve::Reservation;
use crate::resource::Promotion;
use crate::{Error, Result, Slot, StepSerial};

fn order<T>(call: &'static str, why: String) -> Result<T> {
    Err(Error::Order { call, why })
}

impl Ledger {
    /// An outstanding step.
    pub(super) fn step(&self, serial: StepSerial) -> Option<&Reservation> {
        self.steps.iter().find(|step| step.serial == serial)
    }

    /// Refuses a commit out of order.
    pub(super) fn check_commit(&self, serial: StepSerial) -> Result<()> {
        match self.steps.front() {
            Some(first) if first.serial == serial && !first.ahead => Ok(()),
            Some(first) if first.serial == serial => {
                order("commit", format!("step {serial} was planned ahead; promote it first"))
            }
            Some(first) if self.step(serial).is_some() => {
                order("commit", format!("step {} comes before step {serial}; commit it first", first.serial))
            }
            _ => order("commit", format!("step {serial} is not outstanding; admit it first")),
        }
    }

    /// Keeps what the oldest step did; with `commit: false` only gives back what it took.
    pub(super) fn commit(&mut self, config: &KvConfig, serial: StepSerial) -> Result<()> {
        self.check_commit(serial)?;
        let mut r = self.steps.pop_front().expect("the check found it in front");
        self.let_go(&r)?;
        let kept = r.commit;
        if !kept {
            self.unclaim(&mut r)?;
        } else {
            if config.prefix_cache {
                let rows = std::mem::take(&mut r.rows);
                rows.iter().try_for_each(|row| self.offer(config, row, &mut r.work))?;
            }
            let drops = r.take_drops();
            for ((request, label), stream) in r.work {
                self.request_mut(&request)?.streams.insert(label, stream);
            }
            self.release_all(drops.into_iter())?;
        }
        self.events.push(|| KvEvent::Committed { serial, kept });
        Ok(())
    }

    /// Undoes a step, and before it the one that was planned on top. Steps that are not there are undone already.
    pub(super) fn rollback(&mut self, serial: StepSerial) -> Result<()> {
        while self.step(serial).is_some() {
            let mut r = self.steps.pop_back().expect("the step is there");
            self.let_go(&r)?;
            self.unclaim(&mut r)?;
            self.events.push(|| KvEvent::RolledBack { serial: r.serial });
        }
        Ok(())
    }

    /// Clears the marks of a step that is no longer outstanding.
    fn let_go(&mut self, r: &Reservation) -> Result<()> {
        self.plans.forget(r.slot, r.serial);
        for request in r.requests() {
            self.request_mut(&request)?.holds -= 1;
        }
        Ok(())
    }

    /// Whether what the `at`-th outstanding step was built on is still what the ones before it will leave.
    pub(super) fn stands(&self, at: usize) -> bool {
        self.steps[at].bases.iter().all(|(key, base)| {
            let before = self.steps.iter().take(at).rev().filter(|step| step.commit);
            let now = before.filter_map(|step| step.work.get(key)).next().or_else(|| self.stored(key));
            let now = now.map(|stream| (stream.generation, stream.len));
            if planted("wrong-generation") {
                return now.map(|(_, len)| len) == base.map(|(_, len)| len);
            }
            now == *base
        })
    }

    /// Whether a step planned ahead still stands: every stream that it built on has the generation and the length
    /// that it was planned for. Then its turn has come. A stale one is to be rolled back and admitted anew.
    pub(super) fn promote(&mut self, serial: StepSerial, slot: Slot) -> Result<Promotion> {
        let Some(r) = self.step(serial) else {
            return order("promote", format!("step {serial} is not outstanding; admit it first"));
        };
        if r.slot != slot {
            let why = format!("step {serial} was planned into slot {}, not {}", r.slot.0, slot.0);
            return order("promote", why);
        }
        let first = self.steps.front().map(|first| first.serial);
        if first != Some(serial) {
            return order("promote", format!("step {} still runs; commit it first", first.unwrap_or(serial)));
        }
        if !self.stands(0) {
            return Ok(Promotion::Stale);
        }
        self.steps.front_mut().expect("it is in front").ahead = false;
        Ok(Promotion::Valid)
    }
}
