//! SIGINT and SIGTERM: the first asks the work to end in order, the second ends the program at once.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// What shells add to a signal's number to make an exit code of it.
const OFFSET: i32 = 128;

/// Whether a signal has come, and which.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interrupt {
    /// One of the signals came.
    any: Arc<AtomicBool>,
    /// It was SIGTERM.
    term: Arc<AtomicBool>,
}

impl Interrupt {
    /// Takes both signals from now on, for the rest of the program.
    ///
    /// # Errors
    /// What the system says when it lets nobody take them.
    pub(crate) fn install() -> io::Result<Interrupt> {
        let interrupt = Interrupt::default();
        for signal in [SIGINT, SIGTERM] {
            // In this order: the flag is still down when the first signal comes here, and up for the second.
            flag::register_conditional_shutdown(signal, OFFSET + signal, interrupt.any.clone())?;
            if signal == SIGTERM {
                flag::register(signal, interrupt.term.clone())?;
            }
            flag::register(signal, interrupt.any.clone())?;
        }
        Ok(interrupt)
    }

    /// The exit code of a program that a signal has ended, 128 and its number; `None` while none has come.
    pub(crate) fn code(&self) -> Option<u8> {
        let signal = if self.term.load(Ordering::SeqCst) { SIGTERM } else { SIGINT };
        self.any.load(Ordering::SeqCst).then(|| u8::try_from(OFFSET + signal).unwrap_or(u8::MAX))
    }
}
