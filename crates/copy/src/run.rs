//! One copy from beginning to end: its phases and its result.

use crate::{
    CopyEvent, Options, Outcome, Refusal, Verify,
    destination::{self, Prepared, failed},
    figures::Figures,
    job::Job,
    links::Links,
    metadata::Meta,
    pair::{Pair, duplicate},
    queue::Queue,
    scout,
    state::{self, CopyState},
    trouble::{lack, reason, shown},
    walk::{Walk, Worker},
};
use parking_lot::{Condvar, Mutex};
use rustix::fs;
use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, BorrowedFd},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

/// Interval of syncing and recording progress, so that a crash of the machine costs at most this much work.
const NOTE_EVERY: Duration = Duration::from_secs(30);
/// Stack size of the threads, bytes.
const STACK: usize = 2 << 20;

/// Copies the content of SOURCE to DEST. Counts in `figures`, reports failures of single entries as they occur,
/// ends early when `stop` becomes true. An incomplete copy is continued by a call with the same options.
///
/// # Errors
/// The copy could not begin; nothing was changed.
pub fn run(
    options: &Options,
    figures: &Figures,
    stop: &AtomicBool,
    told: &(dyn Fn(CopyEvent) + Sync),
) -> Result<Outcome, Refusal> {
    run_with(options, figures, stop, told, STACK)
}

/// The same with threads of this stack size, bytes.
fn run_with(
    options: &Options,
    figures: &Figures,
    stop: &AtomicBool,
    told: &(dyn Fn(CopyEvent) + Sync),
    stack: usize,
) -> Result<Outcome, Refusal> {
    let Prepared { source, source_path: _, source_meta, dest, dest_meta, fresh, state, resumed } =
        destination::prepare(options)?;
    let open = |directory: BorrowedFd<'_>| {
        duplicate(directory).map_err(|error| failed("cannot open", &options.destination, &error))
    };
    let job = Job {
        options,
        figures,
        stop,
        told,
        source_device: source_meta.device,
        dest: open(dest.as_fd())?,
        dest_identity: dest_meta.identity(),
        resumed,
        own: (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw()),
        id: state.as_ref().map(|state| state.id.clone()).unwrap_or_default(),
        doubtful: state.as_ref().and_then(|state| state.doubtful),
        dest_device: dest_meta.device,
        complete: AtomicBool::new(false),
        devices: Mutex::new(BTreeMap::new()),
        fatal: Mutex::new(None),
        over: AtomicBool::new(false),
        stack,
    };
    let root = Pair { path: PathBuf::new(), source, dest, meta: source_meta, device: dest_meta.device, fresh };
    if job.doubtful.is_some() {
        job.notice(
            "the machine was started anew since this copy was begun: what was not known to be on the device is copied again".to_owned(),
        );
    }
    job.whole(Arc::new(root), &dest_meta, state);
    Ok(Outcome {
        resumed,
        interrupted: stop.load(Ordering::Relaxed) && !job.complete.load(Ordering::Relaxed),
        fatal: job.fatal.into_inner(),
        failures: figures.failures.load(Ordering::Relaxed),
    })
}

impl Job<'_> {
    /// Runs all phases.
    fn whole(&self, root: Arc<Pair>, dest: &Meta, state: Option<CopyState>) {
        thread::scope(|scope| {
            if self.options.estimate {
                let root = Arc::clone(&root);
                if let Err(error) = self.start(scope, move || scout::count(self, root.source.as_fd())) {
                    self.notice(format!("the remaining time is not estimated: {}", no_thread(&error)));
                }
            }
            if let Some(state) = state {
                self.copy(&root, dest, state);
            } else {
                self.figures.verifying.store(true, Ordering::Relaxed);
                self.walk(&root, true, || {});
                self.complete.store(!self.is_stopped(), Ordering::Relaxed);
            }
            // The scout is not needed any more, if it is still counting.
            self.over.store(true, Ordering::Relaxed);
        });
    }

    fn copy(&self, root: &Arc<Pair>, dest: &Meta, state: CopyState) {
        let walk = Walk { job: self, compare: false, queue: Queue::new(0), links: Links::default() };
        let prepared = Worker::new(&walk, 0).prepare(root, dest);
        drop(walk);
        if let Err(trouble) = prepared {
            let sentence = trouble.sentence(&self.options.source, &self.options.destination, &root.path);
            self.fail_wholly(sentence, trouble.lack());
            return;
        }
        self.copy_and_note(root, state);
        if self.is_stopped() {
            return;
        }
        if self.options.sync || self.options.verify == Verify::After {
            self.sync_or_fail();
        }
        if self.options.verify == Verify::After && !self.is_stopped() {
            self.figures.verifying.store(true, Ordering::Relaxed);
            self.walk(root, true, || {});
        }
        if self.is_stopped() || self.figures.failures.load(Ordering::Relaxed) > 0 {
            return;
        }
        self.end(root);
    }

    /// Ends a complete copy: removes the state, and sets the metadata of the root, which that changes.
    fn end(&self, root: &Arc<Pair>) {
        if let Err(error) = CopyState::remove(root.dest.as_fd()) {
            let what = failed("cannot remove", &self.options.destination.join(state::NAME), &error).what;
            self.fail_wholly(what, lack(&error));
            return;
        }
        let walk = Walk { job: self, compare: false, queue: Queue::new(0), links: Links::default() };
        if let Err(trouble) = Worker::new(&walk, 0).finish(root) {
            self.failed(&trouble, &root.path);
        }
        if self.options.sync {
            self.sync_or_fail();
        }
        self.complete.store(true, Ordering::Relaxed);
    }

    fn sync_or_fail(&self) {
        if let Err(error) = self.sync() {
            let what = format!("cannot write out {}: {}", shown(&self.options.destination), reason(&error));
            self.fail_wholly(what, lack(&error));
        }
    }

    /// Runs the walk that copies, and records regularly up to when everything is on the device.
    fn copy_and_note(&self, root: &Arc<Pair>, mut state: CopyState) {
        let done = (Mutex::new(false), Condvar::new());
        thread::scope(|scope| {
            let done = &done;
            let noting = self.start(scope, move || {
                while !has_ended(done) {
                    self.note(root, &mut state);
                }
            });
            if let Err(error) = noting {
                self.fail_wholly(no_thread(&error), lack(&error));
                return;
            }
            self.walk(root, false, || {
                *done.0.lock() = true;
                done.1.notify_all();
            });
        });
    }

    /// Syncs DEST, and records the time before which everything is on the device.
    fn note(&self, root: &Pair, state: &mut CopyState) {
        let noted = CopyState::time_of(root.dest.as_fd()).and_then(|now| {
            fs::syncfs(&root.dest)?;
            state.synced = Some(now);
            state.write(root.dest.as_fd())
        });
        if let Err(error) = noted {
            let what = failed("cannot note the progress in", &self.options.destination, &error).what;
            self.fail_wholly(what, lack(&error));
        }
    }

    /// Starts a thread.
    ///
    /// # Errors
    /// The system cannot start one.
    fn start<'scope>(
        &self,
        scope: &'scope thread::Scope<'scope, '_>,
        body: impl FnOnce() + Send + 'scope,
    ) -> io::Result<()> {
        let thread = thread::Builder::new().name("nacre-copy".to_owned()).stack_size(self.stack);
        thread.spawn_scoped(scope, body).map(drop)
    }

    /// Walks through both trees with all workers, of which the calling thread is one.
    fn walk(&self, root: &Arc<Pair>, compare: bool, ended: impl FnOnce()) {
        let workers = self.options.jobs.max(1);
        let walk = Walk { job: self, compare, queue: Queue::new(workers), links: Links::default() };
        if let Err(error) = fs::seek(&root.source, fs::SeekFrom::Start(0)).map_err(io::Error::from) {
            self.fail_wholly(failed("cannot read the directory", &self.options.source, &error).what, lack(&error));
        }
        thread::scope(|scope| {
            let walk = &walk;
            for number in 1..workers {
                if let Err(error) = self.start(scope, move || Worker::new(walk, number).work(None)) {
                    self.notice(format!("{number} of {workers} workers go on alone: {}", no_thread(&error)));
                    walk.queue.leave(workers - number);
                    break;
                }
            }
            Worker::new(walk, 0).work(Some(Arc::clone(root)));
        });
        ended();
        if compare
            && !self.is_stopped()
            && self.options.verify == Verify::Only
            && let Err(trouble) = Worker::new(&walk, 0).compare_directory(root)
        {
            self.failed(&trouble, &root.path);
        }
    }
}

/// Sentence about a thread that the system cannot start.
fn no_thread(error: &io::Error) -> String {
    format!("cannot start a thread: {}", reason(error))
}

/// Waits for the end of the walk, or for the time to record its progress.
fn has_ended(done: &(Mutex<bool>, Condvar)) -> bool {
    let mut ended = done.0.lock();
    if !*ended {
        done.1.wait_for(&mut ended, NOTE_EVERY);
    }
    *ended
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Reflink;

    /// Larger than any address space.
    const NO_STACK: usize = 1 << 62;

    #[test]
    fn a_thread_that_cannot_start_is_an_error_and_a_missing_worker_none() {
        let trees = tempfile::tempdir().unwrap();
        let (source, destination) = (trees.path().join("source"), trees.path().join("destination"));
        for directory in ["a/b", "c"] {
            std::fs::create_dir_all(source.join(directory)).unwrap();
            std::fs::write(source.join(directory).join("file"), directory).unwrap();
        }
        let options = |verify| Options {
            source: source.clone(),
            destination: destination.clone(),
            jobs: 4,
            update: false,
            verify,
            reflink: Reflink::Auto,
            one_file_system: false,
            strict: false,
            sync: false,
            estimate: true,
        };
        let notices = Mutex::new(Vec::new());
        let copied = |verify, stack| {
            notices.lock().clear();
            let told = |event: CopyEvent| notices.lock().push(format!("{event:?}"));
            run_with(&options(verify), &Figures::default(), &AtomicBool::new(false), &told, stack).unwrap()
        };
        let outcome = copied(Verify::No, NO_STACK);
        assert!(outcome.fatal.is_some_and(|fatal| fatal.what.contains("cannot start a thread")));
        // It is continued.
        let outcome = copied(Verify::No, STACK);
        assert!(outcome.resumed && outcome.complete(), "{outcome:?}");
        // Nothing is noted in a comparison: one worker is enough.
        let outcome = copied(Verify::Only, NO_STACK);
        assert!(outcome.complete(), "{outcome:?}");
        assert!(notices.lock().iter().any(|notice| notice.contains("1 of 4 workers")), "{notices:?}");
        std::fs::write(destination.join("a/b/file"), "x/y").unwrap();
        assert_eq!(copied(Verify::Only, NO_STACK).failures, 1);
    }
}
