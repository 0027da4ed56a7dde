//! Many threads on one union: nothing hangs, only errors that such a race explains, and what is
//! seen at the end is what a remount shows.

use crate::unions::{Directories, host, mem, union};
use nacre_testkit::{World, model::tree};
use nacre_union::{Style, UnionOptions};
use nacre_vfs::{Errno, Layer, Name, Node, OpenFlags, RenameFlags, Result, SetAttr, WriteOrigin};
use std::sync::Arc;

const NAMES: [&[u8]; 4] = [b"a", b"b", b"c", b"d"];

/// A small generator of numbers: the same run for the same seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }

    fn name(&mut self) -> Name<'static> {
        Name::new(NAMES[usize::try_from(self.roll(4)).unwrap()]).unwrap()
    }

    /// A directory that is there now, at most two levels down.
    fn directory(&mut self, world: &World) -> Node {
        let mut at = world.root.clone();
        for _ in 0..self.roll(3) {
            match world.find_in(&at, self.name().bytes()) {
                Ok(found) if found.attr.kind == nacre_vfs::Kind::Directory => at = found.node,
                _ => break,
            }
        }
        at
    }
}

fn one(world: &World, dice: &mut Dice) -> Result<()> {
    let (layer, caller) = (&world.layer, &world.caller);
    let directory = dice.directory(world);
    let name = dice.name();
    let exclusive = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::EXCL);
    match dice.roll(12) {
        0 => layer.create(caller, &directory, name, 0o644, exclusive).map(drop),
        1 => layer.mkdir(caller, &directory, name, 0o755).map(drop),
        2 => layer.unlink(caller, &directory, name),
        3 => layer.rmdir(caller, &directory, name),
        4 | 5 => {
            let flags = if dice.roll(4) == 0 { RenameFlags::EXCHANGE } else { 0 };
            layer.rename(caller, &directory, name, &dice.directory(world), dice.name(), RenameFlags(flags))
        }
        6 => layer
            .link(caller, &world.find_in(&directory, name.bytes())?.node, None, &dice.directory(world), dice.name())
            .map(drop),
        7 | 8 => {
            let file = layer.open(caller, &world.find_in(&directory, name.bytes())?.node, OpenFlags::READ_WRITE)?;
            file.write(&[b'x'; 100], dice.roll(1000), WriteOrigin::Caller).map(drop)
        }
        9 => {
            let change = SetAttr { mode: Some(0o700 | u32::try_from(dice.roll(64)).unwrap()), ..SetAttr::default() };
            layer.setattr(caller, &world.find_in(&directory, name.bytes())?.node, None, &change).map(drop)
        }
        10 => world.page(&directory, 0, true, 100).map(drop),
        _ => layer
            .open(caller, &world.find_in(&directory, name.bytes())?.node, OpenFlags::READ)?
            .read(&mut [0; 64], 0)
            .map(drop),
    }
}

/// What may come of it when others rename and remove at the same time.
const EXPECTED: &[Errno] = &[
    Errno::ENOENT,
    Errno::EEXIST,
    Errno::ENOTDIR,
    Errno::EISDIR,
    Errno::ENOTEMPTY,
    Errno::EINVAL,
    Errno::EPERM,
    Errno::ESTALE,
    Errno::ELOOP,
    Errno::ENXIO,
];

fn load(fresh: &dyn Fn() -> Arc<dyn Layer>, style: Style, seed: u64, rounds: usize) {
    let (upper, lower) = (fresh(), fresh());
    let below = World::new(Arc::clone(&lower));
    let mut dice = Dice(seed);
    for _ in 0..60 {
        let _ = one(&below, &mut dice);
    }
    let redirects = seed.is_multiple_of(2);
    let options = || UnionOptions {
        whiteout: style,
        sync: false,
        directory_redirect: redirects,
        directory_copy_limit: if redirects { 0 } else { 1_000 },
        move_when_full: seed.is_multiple_of(3).then(|| "mfs".parse().unwrap()),
        ..UnionOptions::default()
    };
    let make = || union(vec![(Arc::clone(&upper), "rw"), (Arc::clone(&lower), "ro")], options());
    let world = World::new(make());
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let world = &world;
            scope.spawn(move || {
                nacre_layers::host::prepare_worker().unwrap();
                let mut dice = Dice(seed * 100 + thread);
                for _ in 0..rounds {
                    if let Err(error) = one(world, &mut dice) {
                        assert!(EXPECTED.contains(&error), "seed {seed}: {error:?}");
                    }
                }
            });
        }
    });
    let live = tree(&world);
    drop(world);
    assert_eq!(tree(&World::new(make())), live, "seed {seed} of {style}");
    let work = World::new(upper);
    let node = work.find(b".wh..wh.work").unwrap().node;
    assert!(work.names(&node).is_empty());
}

#[test]
fn in_memory() {
    for style in [Style::Wh, Style::Chardev, Style::Xattr] {
        for seed in 1..13 {
            load(&mem, style, seed, 400);
        }
    }
}

#[test]
fn on_real_directories() {
    nacre_layers::host::prepare_worker().unwrap();
    let directories = Directories::new();
    for seed in 1..5 {
        load(&|| host(&directories.fresh()), Style::Wh, seed, 300);
    }
}
