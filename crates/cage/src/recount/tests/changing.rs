//! A model of a cage that changes the tree during a recount, at every call of the walk into the
//! layer, and in threads.

use super::*;
use nacre_vfs::WriteOrigin;
use std::collections::HashSet;

/// One of the names in the tree.
#[derive(Clone)]
struct Known {
    node: Node,
    id: FileId,
    parent: usize,
    name: String,
    group: Option<usize>,
}

/// A tree with its content, and the changed files. Directories keep their index when others are
/// removed.
struct Cage {
    mem: Arc<Mem>,
    random: u64,
    made: u64,
    directories: Vec<Option<Known>>,
    files: Vec<Known>,
    /// Changed files as the ledger would have them: group, and whether it is removed.
    touched: HashMap<FileId, (Node, Option<usize>)>,
    gone: HashSet<FileId>,
    control: Option<Arc<Control>>,
    budget: usize,
}

impl Cage {
    /// Makes a tree of two groups and a common part, after some changes.
    fn new(seed: u64, changes: usize) -> Cage {
        let mem = Arc::new(Mem::new());
        let root = mem.root().unwrap();
        let top = Known { node: root.node, id: root.attr.id, parent: 0, name: String::new(), group: None };
        let mut cage = Cage {
            mem,
            random: seed | 1,
            made: 0,
            directories: vec![Some(top)],
            files: Vec::new(),
            touched: HashMap::new(),
            gone: HashSet::new(),
            control: None,
            budget: changes,
        };
        for group in 0..2 {
            cage.make_directory(0, Some(group));
        }
        while cage.budget > 0 {
            cage.change();
        }
        cage
    }

    fn rule(&self) -> Arc<ByBlocks> {
        let groups: Vec<&Node> = [1, 2].iter().map(|&at| &self.directories[at].as_ref().unwrap().node).collect();
        rule(&self.mem, &groups)
    }

    /// xorshift64*
    fn next(&mut self, below: usize) -> usize {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        (self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % below.max(1)
    }

    fn a_directory(&mut self) -> (usize, Known) {
        let there: Vec<usize> = (0..self.directories.len()).filter(|&at| self.directories[at].is_some()).collect();
        let at = there[self.next(there.len())];
        (at, self.directories[at].clone().unwrap())
    }

    fn fresh_name(&mut self) -> String {
        self.made += 1;
        format!("n{}", self.made)
    }

    fn touch(&mut self, id: FileId, node: &Node, group: Option<usize>) {
        self.touched.insert(id, (node.clone(), group));
    }

    fn make_directory(&mut self, parent: usize, group: Option<usize>) {
        let (above, name) = (self.directories[parent].clone().unwrap(), self.fresh_name());
        let node = directory(&self.mem, &above.node, &name);
        let id = id(&self.mem, &node);
        self.touch(id, &node, group);
        self.directories.push(Some(Known { node, id, parent, name, group }));
    }

    /// Makes one random change that a cage would permit.
    fn change(&mut self) {
        if self.budget == 0 {
            return;
        }
        self.budget -= 1;
        let kind = self.next(20);
        match kind {
            0..=5 => self.make_file(),
            6..=7 => {
                let (parent, above) = self.a_directory();
                self.make_directory(parent, above.group);
            }
            8 => self.move_directory(),
            9 => self.remove_directory(),
            _ if self.files.is_empty() => {}
            _ => {
                let at = self.next(self.files.len());
                let file = self.files[at].clone();
                self.touch(file.id, &file.node, file.group);
                match kind {
                    10..=12 => self.write(&file),
                    13 => self.set(&file, SetAttr { size: Some(0), ..SetAttr::default() }),
                    14 => {
                        let uid = Some(self.next(3) as u32);
                        self.set(&file, SetAttr { uid, ..SetAttr::default() });
                    }
                    15 => self.link(&file),
                    16..=17 => self.move_file(at),
                    _ => self.remove_file(at),
                }
            }
        }
    }

    fn make_file(&mut self) {
        let (parent, above) = self.a_directory();
        let (name, uid, pages) = (self.fresh_name(), self.next(3) as u32, self.next(5) as u64);
        let node = file(&self.mem, &above.node, &name, uid, pages);
        let id = id(&self.mem, &node);
        self.touch(id, &node, above.group);
        self.files.push(Known { node, id, parent, name, group: above.group });
    }

    fn write(&mut self, file: &Known) {
        let offset = self.next(9) as u64 * 4096;
        self.mem
            .open(&Caller::ROOT, &file.node, OpenFlags::WRITE)
            .unwrap()
            .write(b"y", offset, WriteOrigin::Caller)
            .unwrap();
    }

    fn set(&self, file: &Known, change: SetAttr) {
        self.mem.setattr(&Caller::ROOT, &file.node, None, &change).unwrap();
    }

    fn link(&mut self, file: &Known) {
        let (parent, above) = self.a_directory();
        if above.group == file.group {
            let name = self.fresh_name();
            self.mem.link(&Caller::ROOT, &file.node, None, &above.node, super::name(name.as_bytes())).unwrap();
            self.files.push(Known { parent, name, ..file.clone() });
        }
    }

    fn rename(&self, from: &Known, to: &Known, fresh: &str) -> Result<()> {
        let parent = self.directories[from.parent].as_ref().unwrap();
        let (old, new) = (super::name(from.name.as_bytes()), super::name(fresh.as_bytes()));
        self.mem.rename(&Caller::ROOT, &parent.node, old, &to.node, new, RenameFlags(0))
    }

    fn move_file(&mut self, at: usize) {
        let (file, (parent, above), fresh) = (self.files[at].clone(), self.a_directory(), self.fresh_name());
        let links = self.mem.getattr(&Caller::ROOT, &file.node, None).unwrap().nlink;
        if links == 1 || above.group == file.group {
            self.rename(&file, &above, &fresh).unwrap();
            self.touch(file.id, &file.node, above.group);
            self.files[at] = Known { parent, name: fresh, group: above.group, ..file };
        }
    }

    fn remove_file(&mut self, at: usize) {
        let file = self.files.swap_remove(at);
        let parent = self.directories[file.parent].as_ref().unwrap();
        self.mem.unlink(&Caller::ROOT, &parent.node, super::name(file.name.as_bytes())).unwrap();
        if self.mem.getattr(&Caller::ROOT, &file.node, None).unwrap().nlink == 0 {
            self.gone.insert(file.id);
        }
    }

    fn move_directory(&mut self) {
        let ((at, directory), (parent, above), fresh) = (self.a_directory(), self.a_directory(), self.fresh_name());
        // Not out of its group, not a directory with a limit, and not into itself (the layer
        // refuses that).
        if at > 2 && above.group == directory.group && self.rename(&directory, &above, &fresh).is_ok() {
            self.touch(directory.id, &directory.node, directory.group);
            if let Some(control) = &self.control {
                control.moved(directory.node.clone(), directory.group);
            }
            self.directories[at] = Some(Known { parent, name: fresh, ..directory });
        }
    }

    fn remove_directory(&mut self) {
        let (at, directory) = self.a_directory();
        if at <= 2 {
            return;
        }
        let parent = self.directories[directory.parent].as_ref().unwrap();
        if self.mem.rmdir(&Caller::ROOT, &parent.node, super::name(directory.name.as_bytes())).is_ok() {
            self.directories[at] = None;
            self.touch(directory.id, &directory.node, directory.group);
            self.gone.insert(directory.id);
        }
    }

    /// The ledger's costs of the changed files.
    fn held(&self) -> Vec<Held> {
        let held = self.touched.iter().map(|(&id, (node, group))| {
            let attr = self.mem.getattr(&Caller::ROOT, node, None).unwrap();
            let there = u64::from(!self.gone.contains(&id));
            Held { id, owner: Owner { uid: attr.uid, group: *group }, bytes: attr.blocks * 512 * there, inodes: there }
        });
        held.collect()
    }
}

/// Counts while `change` is called at every opportunity; the result must equal a count of the idle
/// tree.
fn count_while_changing(cage: Cage, at_once: usize, budget: usize) {
    let (rule, mem) = (cage.rule(), Arc::clone(&cage.mem));
    let cage = Arc::new(Mutex::new(Cage { budget, touched: HashMap::new(), gone: HashSet::new(), ..cage }));
    let changing = Arc::clone(&cage);
    let hook = move |_: &Op<'_>, _: Option<&mut Attr>| {
        let mut cage = changing.lock();
        for _ in 0..cage.next(at_once + 1) {
            cage.change();
        }
        Ok(())
    };
    let mut recount = recount(Arc::new(Filtered::new(Arc::new(Hook(hook)), Arc::clone(&mem) as _)), &rule);
    cage.lock().control = Some(recount.control());
    let counted = loop {
        recount.run().unwrap();
        let cage = cage.lock();
        if let Some(counted) = recount.settle(cage.held()) {
            break counted;
        }
    };
    assert_eq!(counted.sums, count(mem, &rule).sums);
    assert!(counted.complete, "{:?}", counted.unread);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
    #[test]
    fn a_count_is_exact_whatever_happens_meanwhile(seed in any::<u64>(), before in 0usize..400, at_once in 0usize..6, budget in 0usize..400) {
        count_while_changing(Cage::new(seed, before), at_once, budget);
    }
}

#[test]
fn a_count_is_exact_while_threads_change_the_tree() {
    for seed in 1..=5 {
        let cage = Cage::new(seed, 3000);
        let (rule, mem) = (cage.rule(), Arc::clone(&cage.mem));
        let cage = Mutex::new(Cage { budget: 6000, touched: HashMap::new(), gone: HashSet::new(), ..cage });
        let mut recount = recount(Arc::clone(&mem) as _, &rule);
        cage.lock().control = Some(recount.control());
        let counted = std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while cage.lock().budget > 0 {
                        cage.lock().change();
                    }
                });
            }
            loop {
                recount.run().unwrap();
                let cage = cage.lock();
                if let Some(counted) = recount.settle(cage.held()) {
                    // Taken under the same lock as the result.
                    break (counted.sums, count(Arc::clone(&mem) as _, &rule).sums);
                }
            }
        });
        assert_eq!(counted.0, counted.1);
    }
}
