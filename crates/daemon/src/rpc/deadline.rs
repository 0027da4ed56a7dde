//! Asks many sockets concurrently, so that a silent one delays no other, and the command by one deadline only.
//!
//! Used by the commands of mounts ([`crate::control::find`]) and of pools. Invariants: each user's sockets have
//! threads of their own, so silent sockets of one user do not keep those of another from being asked; a thread that
//! still waits when the deadline has passed is abandoned, and does not keep the process from ending.

use crate::{clock, runtime::Socket};
use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, VecDeque},
    io::{self, Read},
    os::unix::net::UnixStream,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

/// Number of our own sockets that are asked at one time.
const OURS_AT_ONCE: usize = 64;
/// Number of sockets of each other user that are asked at one time.
const FOREIGN_AT_ONCE: usize = 16;
/// Stack size of a thread in bytes: answers are nested.
const STACK: usize = 1 << 20;

/// Asks each socket; returns the answers at the deadline, or when all have answered, in the order of the sockets.
/// `None`: no answer.
pub fn ask_all<R: Send + 'static>(
    sockets: Vec<Socket>,
    until: Instant,
    ask: impl Fn(&Socket) -> R + Send + Sync + 'static,
) -> Vec<(Socket, Option<R>)> {
    ask_until(sockets, until, ask, &mut |_, _| false)
}

/// Asks each socket until an answer is `enough`.
pub fn ask_until<R: Send + 'static>(
    sockets: Vec<Socket>,
    until: Instant,
    ask: impl Fn(&Socket) -> R + Send + Sync + 'static,
    enough: &mut dyn FnMut(&Socket, &R) -> bool,
) -> Vec<(Socket, Option<R>)> {
    let mut answers: Vec<(Socket, Option<R>)> = sockets.into_iter().map(|socket| (socket, None)).collect();
    let mut queues: BTreeMap<Option<u32>, VecDeque<(usize, Socket)>> = BTreeMap::new();
    for (place, (socket, _)) in answers.iter().enumerate() {
        queues.entry(socket.foreign()).or_default().push_back((place, socket.clone()));
    }
    let (ask, (sender, receiver)) = (Arc::new(ask), mpsc::channel());
    for (owner, queue) in queues {
        let threads = queue.len().min(if owner.is_none() { OURS_AT_ONCE } else { FOREIGN_AT_ONCE });
        let queue = Arc::new(Mutex::new(queue));
        for _ in 0..threads {
            let (queue, ask, sender) = (Arc::clone(&queue), Arc::clone(&ask), sender.clone());
            let work = move || {
                while clock::now() < until {
                    let Some((place, socket)) = queue.lock().pop_front() else { return };
                    // The receiver may have stopped waiting.
                    let _ = sender.send((place, ask(&socket)));
                }
            };
            // Sockets without a thread count as not answered.
            if thread::Builder::new().name("nacre-asking".to_owned()).stack_size(STACK).spawn(work).is_err() {
                break;
            }
        }
    }
    drop(sender);
    while let Ok((place, answer)) = receiver.recv_timeout(until.saturating_duration_since(clock::now())) {
        let Some((socket, slot)) = answers.get_mut(place) else { continue };
        let is_enough = enough(socket, &answer);
        *slot = Some(answer);
        if is_enough {
            break;
        }
    }
    answers
}

/// Reads until a deadline, however slowly bytes arrive; without one, forever.
pub struct DeadlineReader<'a> {
    /// Connection to read from.
    pub stream: &'a UnixStream,
    /// The deadline.
    pub until: Option<Instant>,
}

impl Read for DeadlineReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if let Some(until) = self.until {
            let left = left(until);
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.stream.set_read_timeout(Some(left))?;
        }
        (&mut &*self.stream).read(buffer)
    }
}

/// Returns the time until a deadline.
pub fn left(until: Instant) -> Duration {
    until.saturating_duration_since(clock::now())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    #[test]
    fn who_is_silent_is_waited_for_until_enough_was_heard() {
        let sockets = ["silent", "heard"].map(|name| Socket::ours(PathBuf::from(name))).to_vec();
        let (release, released) = mpsc::channel::<()>();
        let released = Mutex::new(released);
        let ask = move |socket: &Socket| {
            // Until the end of the test.
            let silent = socket.path.ends_with("silent");
            silent.then(|| released.lock().recv())
        };
        let until = clock::now() + Duration::from_secs(1 << 20);
        let answers = ask_until(sockets, until, ask, &mut |socket, _| socket.path.ends_with("heard"));
        let heard: Vec<bool> = answers.iter().map(|(_, answer)| answer.is_some()).collect();
        assert_eq!(heard, [false, true]);
        drop(release);
    }
}
