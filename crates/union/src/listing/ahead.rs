//! Read-ahead of large directories: a thread reads the next names while the previous ones are handed out.
//!
//! Requested by a merge that has just read a full batch; the merge collects the result when it needs the next
//! batch. The thread also enters the names in the merge's set and decides which are visible; only handing them
//! out remains. Invariants:
//! * the merge does not wait for a job that has not begun by then: it reads by itself;
//! * names read ahead are as valid as names that a merge has read and not handed out, and are dropped with them
//!   after a change; the set is then as it was before them;
//! * a merge uses its set again only after it has collected its job;
//! * each union has one thread, which is created with it: threads that serve requests may be bound to one
//!   processor, and a thread that they create would be, too.
//!
//! It shares no code with the thread of `layers/host/ahead.rs`, whose jobs have no result: this one consists
//! mainly of the promise that a merge collects.

use super::{
    Source,
    batch::Batch,
    entered::{self, Entered, Origin},
};
use nacre_vfs::{Caller, Layer, Node, Result};
use parking_lot::{Condvar, Mutex};
use std::{
    sync::{
        Arc,
        mpsc::{Sender, channel},
    },
    thread,
};

#[derive(Default)]
enum PromiseState {
    /// The thread has not begun.
    #[default]
    Asked,
    Reading,
    Read(Result<Batch>),
    /// The merge continues without it, or the thread has failed.
    Over,
}

#[derive(Default)]
struct Promise {
    state: Mutex<PromiseState>,
    read: Condvar,
}

impl Promise {
    /// Changes the state if it is `from`; returns whether it was.
    fn change(&self, from: fn(&PromiseState) -> bool, to: PromiseState) -> bool {
        let mut state = self.state.lock();
        let is = from(&state);
        if is {
            *state = to;
            self.read.notify_all();
        }
        is
    }
}

struct Job {
    layer: Arc<dyn Layer>,
    directory: Node,
    caller: Caller,
    from: u64,
    reads_marks: bool,
    index: usize,
    last: bool,
    entered: Arc<Mutex<Entered>>,
    promise: Arc<Promise>,
}

impl Job {
    fn run(self) {
        /// Ends the wait for a job if the thread ends in the middle of it.
        struct Begun(Arc<Promise>);
        impl Drop for Begun {
            fn drop(&mut self) {
                self.0.change(|state| matches!(state, PromiseState::Reading), PromiseState::Over);
            }
        }
        if self.promise.change(|state| matches!(state, PromiseState::Asked), PromiseState::Reading) {
            let begun = Begun(self.promise);
            let mut batch = Batch::of_many();
            let read = batch.read(&*self.layer, &self.directory, &self.caller, self.from);
            let Job { reads_marks, index, last, .. } = self;
            let origin = Origin { layer: &*self.layer, directory: &self.directory, reads_marks, index, last };
            // The merge reads an unreadable whiteout again when it gets there, and reports the error.
            if read.is_ok()
                && let Err(error) = entered::enter_all(&self.entered, &origin, &mut batch)
            {
                tracing::debug!(%error, "names read ahead are not decided");
            }
            begun.0.change(|state| matches!(state, PromiseState::Reading), PromiseState::Read(read.map(|()| batch)));
        }
    }
}

/// The thread that reads ahead.
pub(super) struct Reader {
    jobs: Option<Sender<Job>>,
}

impl Reader {
    /// Starts the thread; dropping the reader ends it. Without a thread, nothing is read ahead.
    pub(super) fn start() -> Reader {
        let (jobs, queue) = channel::<Job>();
        let reader = thread::Builder::new().name("union-ahead".to_owned()).stack_size(256 << 10);
        match reader.spawn(move || queue.into_iter().for_each(Job::run)) {
            Ok(_) => Reader { jobs: Some(jobs) },
            Err(error) => {
                tracing::debug!(%error, "no thread reads ahead");
                Reader { jobs: None }
            }
        }
    }

    /// Requests that the names after `from` are read and entered in a set; `None` where that is impossible.
    /// `index` is the source's number, `last` whether there is none below it.
    pub(super) fn ask(
        &self,
        source: &Source<'_>,
        caller: &Caller,
        from: u64,
        (index, last): (usize, bool),
        entered: &Arc<Mutex<Entered>>,
    ) -> Option<Ahead> {
        let (shared, jobs) = (source.shared?, self.jobs.as_ref()?);
        let promise = Arc::<Promise>::default();
        let job = Job {
            layer: Arc::clone(shared),
            directory: source.directory.clone(),
            caller: *caller,
            from,
            reads_marks: source.reads_marks,
            index,
            last,
            entered: Arc::clone(entered),
            promise: Arc::clone(&promise),
        };
        jobs.send(job).ok()?;
        Some(Ahead { slot: source.slot, index, from, promise })
    }
}

/// Names that the thread reads, or has read.
pub(super) struct Ahead {
    slot: u8,
    index: usize,
    from: u64,
    promise: Arc<Promise>,
}

impl Ahead {
    /// Whether these are the names of a source after that position.
    pub(super) fn is(&self, slot: u8, from: u64) -> bool {
        (self.slot, self.from) == (slot, from)
    }

    /// The number of their source.
    pub(super) fn index(&self) -> usize {
        self.index
    }

    /// The names; `None` if the thread has not begun, or failed.
    pub(super) fn names(self) -> Option<Result<Batch>> {
        let mut state = self.promise.state.lock();
        while matches!(*state, PromiseState::Reading) {
            self.promise.read.wait(&mut state);
        }
        match std::mem::replace(&mut *state, PromiseState::Over) {
            PromiseState::Read(names) => Some(names),
            PromiseState::Asked | PromiseState::Reading | PromiseState::Over => None,
        }
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.promise.change(|state| matches!(state, PromiseState::Asked), PromiseState::Over);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacre_layers::mem::Mem;
    use nacre_vfs::{Kind, Name};

    fn filled(count: usize) -> Arc<dyn Layer> {
        let layer: Arc<dyn Layer> = Arc::new(Mem::new());
        let root = layer.root().unwrap().node;
        for number in 0..count {
            let name = format!("{number}");
            layer.mknod(&Caller::ROOT, &root, Name::new(name.as_bytes()).unwrap(), Kind::File, 0o644, (0, 0)).unwrap();
        }
        layer
    }

    #[test]
    fn what_is_read_ahead_is_what_the_branch_has() {
        let (layer, reader) = (filled(3), Reader::start());
        let root = layer.root().unwrap().node;
        let source = Source {
            layer: &*layer,
            shared: Some(&layer),
            directory: &root,
            slot: 7,
            reads_marks: false,
            x_directory: false,
        };
        let entered = Arc::<Mutex<Entered>>::default();
        // The first one may come too late: then the merge reads by itself.
        let batch = std::iter::repeat_with(|| reader.ask(&source, &Caller::ROOT, 0, (0, false), &entered).unwrap())
            .inspect(|ahead| assert!(ahead.is(7, 0) && !ahead.is(7, 1) && !ahead.is(6, 0)))
            .find_map(|ahead| {
                thread::yield_now();
                ahead.names()
            });
        let mut batch = batch.unwrap().unwrap();
        let mut names = Vec::new();
        while let Some((name, _)) = batch.first() {
            assert_eq!(batch.is_hidden(), Some(false));
            names.push(name.to_string());
            batch.advance();
        }
        names.sort();
        assert_eq!(names, ["0", "1", "2"]);
        assert!(!batch.is_full());
        assert_eq!(entered.lock().covered, (0, batch.end().unwrap()));
    }

    #[test]
    fn nobody_waits_for_a_thread_that_is_not_there() {
        let layer = filled(1);
        let root = layer.root().unwrap().node;
        let source = Source {
            layer: &*layer,
            shared: Some(&layer),
            directory: &root,
            slot: 0,
            reads_marks: false,
            x_directory: false,
        };
        let entered = Arc::<Mutex<Entered>>::default();
        assert!(Reader { jobs: None }.ask(&source, &Caller::ROOT, 0, (0, false), &entered).is_none());
        let (jobs, queue) = channel();
        let ahead = Reader { jobs: Some(jobs) }.ask(&source, &Caller::ROOT, 0, (0, false), &entered).unwrap();
        assert!(ahead.names().is_none());
        // A job that was given up is not begun.
        let job = queue.recv().unwrap();
        let promise = Arc::clone(&job.promise);
        job.run();
        assert!(matches!(*promise.state.lock(), PromiseState::Over));
        assert_eq!(entered.lock().hidden.len(), 0);
    }
}
