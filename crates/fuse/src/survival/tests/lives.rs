//! A front end over a layer, in one life after the other.
//!
//! Used by `repeated.rs`, `unions.rs` and `steps.rs`. There is no kernel: requests are passed to the front end as the
//! kernel would send them, and resent to the front end of the next life.

use super::super::{Survival, Survives};
use crate::{door::Door, options::FuseOptions};
use fusewire::{Groups, Handler, Header, Op, Reply, Request, SecurityContexts, abi};
use nacre_layers::context::Context;
use nacre_stack::spec::StackSpec;
use nacre_vfs::{Layer, LeftNumbers};
use parking_lot::Mutex;
use std::{
    path::{Path, PathBuf},
    sync::{Arc, mpsc::channel},
};

/// When a process dies during a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Death {
    /// Not at all.
    None,
    /// After it recorded that it begins.
    Begun,
    /// After the layer had carried it out.
    CarriedOut,
    /// After it recorded the reply.
    Answered,
}

impl Death {
    pub const ALL: [Death; 3] = [Death::Begun, Death::CarriedOut, Death::Answered];
}

/// Handoff state of a union, kept over crashes.
#[derive(Debug, Default)]
struct Numbers(Mutex<Vec<u64>>);

impl LeftNumbers for Numbers {
    fn read(&self) -> Vec<u64> {
        self.0.lock().clone()
    }

    fn note(&self, numbers: &[u64]) {
        *self.0.lock() = numbers.to_vec();
    }

    fn give_up(&self, why: &str) {
        panic!("{why}");
    }
}

/// Creates the layer of one life.
type MakeLayer = Box<dyn Fn(Arc<dyn LeftNumbers>) -> Arc<dyn Layer>>;

pub(super) struct Lives {
    _place: tempfile::TempDir,
    /// The directory with the files created in the mount.
    pub source: PathBuf,
    /// The branch below it, of a union.
    pub lower: PathBuf,
    make: MakeLayer,
    numbers: Arc<Numbers>,
    memory: Survival,
    pub door: Arc<Door>,
    pub layer: Arc<dyn Layer>,
    dead: Vec<(Arc<Door>, Arc<dyn Layer>)>,
    unique: u64,
}

impl Lives {
    /// Over the layer that this line creates from SOURCE and LOWER, which is filled first.
    pub fn over(line: &str, fill: impl FnOnce(&Path)) -> Lives {
        let place = tempfile::tempdir().unwrap();
        let [source, lower] = ["source", "lower"].map(|name| place.path().join(name));
        [&source, &lower].into_iter().for_each(|directory| std::fs::create_dir(directory).unwrap());
        fill(&lower);
        let line = line.replace("SOURCE", source.to_str().unwrap()).replace("LOWER", lower.to_str().unwrap());
        Lives::made_by(place, Box::new(move |numbers| layer(&line, numbers)))
    }

    /// Over the layer that `make` creates from the directories in `place`.
    pub fn made_by(place: tempfile::TempDir, make: MakeLayer) -> Lives {
        let [source, lower] = ["source", "lower"].map(|name| place.path().join(name));
        let (numbers, memory) = (Arc::<Numbers>::default(), Survival::new().unwrap());
        let layer = make(Arc::clone(&numbers) as Arc<dyn LeftNumbers>);
        let door = door(&layer, &memory);
        Lives { _place: place, source, lower, make, numbers, memory, door, layer, dead: Vec::new(), unique: 1000 }
    }

    /// The front end dies with all of its own memory, and another one goes on.
    pub fn die(&mut self) {
        self.replace();
        self.door.finish_renames(self.survives());
    }

    fn replace(&mut self) {
        self.memory.next_life();
        let next = (self.make)(Arc::clone(&self.numbers) as Arc<dyn LeftNumbers>);
        let next_door = door(&next, &self.memory);
        // Its descriptors are not closed, as in a shared table.
        let dead = (std::mem::replace(&mut self.door, next_door), std::mem::replace(&mut self.layer, next));
        self.dead.push(dead);
        self.door.take_up_open_files(self.survives());
    }

    /// As [`Self::die`]; the next process dies as well, while it finishes renames: `strike` makes all of its steps fail.
    pub fn die_twice(&mut self, strike: impl FnOnce()) {
        self.replace();
        strike();
        self.door.finish_renames(self.survives());
        self.memory.set_unfinished(true);
    }

    /// Closes the descriptors of dead front ends, where none was taken over.
    pub fn bury(&mut self) {
        self.dead.clear();
    }

    pub fn survives(&self) -> &Survives {
        self.door.survives.as_ref().unwrap()
    }

    pub fn ask(&self, unique: u64, nodeid: u64, op: Op<'_>) -> Result<Vec<u8>, i32> {
        let mut space = vec![0; 8192];
        let mut reply = Reply::new(&mut space);
        let done = self.door.handle(&request(unique, nodeid, op), &mut reply);
        done.map(|()| reply.built().to_vec()).map_err(|error| error.0)
    }

    /// Records that a request is about to be carried out.
    pub fn begin(&self, unique: u64, nodeid: u64, op: Op<'_>) {
        self.door.note_begun(self.survives(), &request(unique, nodeid, op)).unwrap();
    }

    /// Sends a request, dies, and sends it again: the reply is the same.
    pub fn again(&mut self, unique: u64, nodeid: u64, op: Op<'_>) -> Result<Vec<u8>, i32> {
        let first = self.ask(unique, nodeid, op);
        self.die();
        assert_eq!(self.ask(unique | abi::UNIQUE_RESEND, nodeid, op), first, "{op:?}");
        first
    }

    /// Resends a request begun by a front end that died before it could record the reply.
    pub fn finish(&mut self, unique: u64, nodeid: u64, op: Op<'_>) -> Result<Vec<u8>, i32> {
        self.carry_out_unanswered(unique, nodeid, op);
        self.die();
        self.ask(unique | abi::UNIQUE_RESEND, nodeid, op)
    }

    /// Carries out a request until the layer has returned: the record of the reply is lost.
    pub fn carry_out_unanswered(&self, unique: u64, nodeid: u64, op: Op<'_>) {
        self.begin(unique, nodeid, op);
        let _ = self.door.dispatch(&request(unique, nodeid, op), &mut Reply::new(&mut vec![0; 8192]));
    }

    /// Carries out a request with this crash.
    pub fn carry_out(&mut self, death: Death, nodeid: u64, op: Op<'_>) -> Result<Vec<u8>, i32> {
        self.unique += 2;
        let unique = self.unique;
        match death {
            Death::None => self.ask(unique, nodeid, op),
            Death::Begun => {
                self.begin(unique, nodeid, op);
                self.die();
                self.ask(unique | abi::UNIQUE_RESEND, nodeid, op)
            }
            Death::CarriedOut => self.finish(unique, nodeid, op),
            Death::Answered => self.again(unique, nodeid, op),
        }
    }

    /// The node at a path, by a lookup of each name.
    pub fn node(&mut self, path: &str) -> u64 {
        path.split('/').filter(|name| !name.is_empty()).fold(1, |parent, name| {
            let found = self.carry_out(Death::None, parent, Op::Lookup { name: name.as_bytes() });
            number(&found.unwrap_or_else(|error| panic!("{path}: {error}")), 0)
        })
    }
}

impl Drop for Lives {
    fn drop(&mut self) {
        std::mem::forget(std::mem::take(&mut self.dead));
    }
}

/// The number at this offset of a reply.
pub(super) fn number(body: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(body[at..at + 8].try_into().unwrap())
}

fn request(unique: u64, nodeid: u64, op: Op<'_>) -> Request<'_> {
    let header = Header { unique, opcode: 0, nodeid, uid: 0, gid: 0, pid: 0 };
    Request { header, op, groups: Groups::default(), security: SecurityContexts::default() }
}

fn layer(line: &str, numbers: Arc<dyn LeftNumbers>) -> Arc<dyn Layer> {
    let spec = StackSpec::from_line(line.as_bytes()).unwrap_or_else(|error| panic!("{line}: {error}"));
    let mut context = Context::system().unwrap();
    context.left_numbers = Some(numbers);
    nacre_stack::build(&spec, &context).unwrap_or_else(|error| panic!("{line}: {error}")).layer
}

fn door(layer: &Arc<dyn Layer>, memory: &Survival) -> Arc<Door> {
    let options = FuseOptions { survival: Some(memory.clone()), ..FuseOptions::new("/nowhere") };
    // Without a receiver nothing is sent.
    Arc::new(Door::new(Arc::clone(layer), options, channel().0, 0).unwrap())
}
