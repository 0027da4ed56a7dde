//! Taking a pool in a bucket over from its last writer: noting the newest root, and fencing a writer that commits
//! faster than the pool can be read.
//!
//! Caller: [`Objects`], and the import of a pool. Invariant: a root that is put unread has the content of the newest
//! one, and keeps its reference to its writer's log.

use super::bucket::Put;
use super::root_body::RootBody;
use super::{Backend, Moment, NewestRoot, Objects, Result, host_name, root_key};
use crate::error::PoolError;
use crate::label::Root;

/// Number of attempts to take a pool over unread, each after a commit of its writer.
const TAKING_MOST: usize = 200;
/// One of this many attempts looks for the newest root of all, the others for the one after the last.
const STEPS: usize = 8;

impl Objects {
    /// Puts a root with the same content as the newest one before anything else of the pool is read, since its writer
    /// may commit faster than the pool can be read. Does nothing where the import is to be refused because of the
    /// newest root, or because of a log on another machine, which `without_log` gives up.
    ///
    /// # Errors
    /// [`PoolError::Device`]; [`PoolError::Refused`] where a writer other than the expected one has the pool, or
    /// where this writer commits faster than that.
    pub fn take_over_unread(&self, without_log: bool) -> Result<()> {
        let Some(NewestRoot { root: mut newest, lost: 0 }) = self.newest_root()? else { return Ok(()) };
        for tries in 1..=TAKING_MOST {
            match self.missing_log()? {
                Some(_) if without_log => self.give_up_log(),
                Some(_) => return Ok(()),
                None => {}
            }
            // Its writer may have been taken over by another process meanwhile, with an epoch of its own.
            self.claim_epoch(0)?;
            let (now, state) = (self.writer.moment(), self.state.lock());
            let (epoch, log) = (state.epoch, state.inherited);
            drop(state);
            let root = Root { generation: newest.generation + 1, clean: false, ..newest.clone() };
            let key = root_key(root.generation);
            // With few requests: its writer makes two for a commit.
            if matches!(self.bucket.put_new(&key, &self.encode(&root, epoch, log, now)?), Ok(Put::Made)) {
                return Ok(());
            }
            let found = if tries % STEPS == 0 { None } else { self.read_root(&key)? };
            newest = match found {
                Some(body) => self.take_up(body?, now)?,
                None => self.newest_root()?.map_or(newest, |found| found.root),
            };
        }
        let why = "its writer commits faster than this machine reaches the bucket: end it, or try again";
        Err(PoolError::Refused(why.to_owned()))
    }

    /// Encodes a root of this writer.
    pub(super) fn encode(&self, root: &Root, epoch: u32, log: u32, now: Moment) -> Result<Vec<u8>> {
        let (nonce, host) = (self.writer.nonce, self.writer.host.clone());
        RootBody { root: root.clone(), epoch, log, time: now.time, nonce, host }.encode()
    }

    /// Notes the newest root and its writer, which has to be the expected one.
    pub(super) fn take_up(&self, body: RootBody, now: Moment) -> Result<Root> {
        let expected = self.expected.or(self.goes_on.then_some(self.writer.nonce));
        let is_taken = self.state.lock().epoch == body.epoch && body.nonce == self.writer.nonce;
        if expected.is_some_and(|expected| body.nonce != expected) && !is_taken {
            return Err(PoolError::Refused(format!("the pool was taken over by '{}'", host_name(&body.host))));
        }
        if let Some(seen) = &self.seen {
            seen.check(body.root.generation)?;
        }
        let mut state = self.state.lock();
        (state.last, state.last_nonce) = (Some((body.root.generation, now)), body.nonce);
        // A root that was put unread does not describe the previous writer.
        if !is_taken {
            (state.found, state.host, state.inherited) = (body.epoch, body.host, body.log);
            state.writer = body.nonce;
        }
        Ok(body.root)
    }
}
