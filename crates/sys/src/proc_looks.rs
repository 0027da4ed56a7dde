//! Reads of other processes' `/proc` files, with a time limit.
//!
//! The kernel blocks some of these reads while a process executes a new program (execve(2); as of
//! Linux 6.18, reads of `exe`, `cwd` or `fd` sleep), and it closes files meanwhile: on a file
//! system that does not answer, for as long as its owner likes. So a separate thread reads, and the
//! caller continues without the result after a while. Invariant: each [`ProcLooks`] has at most one
//! such thread, however many callers there are.

use std::{
    io,
    sync::{Arc, mpsc},
    time::Duration,
};

use parking_lot::{ArcMutexGuard, Mutex, RawMutex};

/// Reader with one thread at a time.
#[derive(Debug, Default)]
pub struct ProcLooks {
    looking: Arc<Mutex<()>>,
}

impl ProcLooks {
    /// Runs `look` in a thread and returns its result; `None` if it, or an earlier one, takes
    /// longer than `limit`.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn within<T: Send + 'static>(
        &self,
        limit: Duration,
        look: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<Option<T>> {
        let Some(one) = self.looking.try_lock_arc_for(limit) else { return Ok(None) };
        let (found, finding) = mpsc::sync_channel(1);
        let body = move || {
            let _one: ArcMutexGuard<RawMutex, ()> = one;
            // A caller whose time limit has passed does not receive it.
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
