//! Looks at other processes in `/proc`, by whoever must not wait for them.
//!
//! The kernel tells little of a process while it becomes another program (execve(2); as of Linux
//! 6.18, whoever asks for `exe`, `cwd` or `fd` sleeps), and it closes files meanwhile: of a file
//! system that does not answer, for as long as its user likes. So a thread of its own looks, and
//! whoever asked goes on without it after a while. Invariant: there is one such thread at most for
//! each [`ProcLooks`], however many ask.

use std::{
    io,
    sync::{Arc, mpsc},
    time::Duration,
};

use parking_lot::{ArcMutexGuard, Mutex, RawMutex};

/// One look at a time.
#[derive(Debug, Default)]
pub struct ProcLooks {
    looking: Arc<Mutex<()>>,
}

impl ProcLooks {
    /// What `look` finds; `None` if it takes longer than `limit`, or one before it does.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn within<T: Send + 'static>(
        &self,
        limit: Duration,
        look: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<Option<T>> {
        let Some(one) = self.looking.try_lock_arc_for(limit) else { return Ok(None) };
        let (found, finding) = mpsc::sync_channel(1);
        let body = move || {
            let _one: ArcMutexGuard<RawMutex, ()> = one;
            // Nobody listens any more who has waited for too long.
            let _ = found.try_send(look());
        };
        std::thread::Builder::new().name("looks at /proc".to_owned()).spawn(body)?;
        Ok(finding.recv_timeout(limit).ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_goes_on_and_one_look_waits_at_most() {
        let looks = ProcLooks::default();
        let long = Duration::from_secs(600);
        assert_eq!(looks.within(long, || 1).unwrap(), Some(1));
        let (go, gone) = mpsc::channel::<()>();
        let held = looks.within(Duration::from_millis(10), move || gone.recv());
        assert!(held.unwrap().is_none());
        assert_eq!(looks.within(Duration::from_millis(10), || 2).unwrap(), None);
        drop(go);
        assert_eq!(looks.within(long, || 3).unwrap(), Some(3));
    }
}
