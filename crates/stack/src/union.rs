//! Unions of a stack: opening their branches, claiming those that are written (`claim.rs`), and changing the list while
//! it serves.
//!
//! Called by the builder above and, for changes, by the daemon that serves the stack. Invariant:
//! the branches in the specification are those of the union, in the same order.

use super::{
    BuildError, Handle, Stack, build_in,
    claim::{Claim, claim, work_lock},
};
use crate::spec::{BranchSpec, LayerSpec, StackSpec, UnionSpec};
use nacre_cage::Cage;
use nacre_layers::{context::Context, host::Tree};
use nacre_union::{BranchMode, ChangeError, Control, Member, Union, Words, base_log::BaseLog};
use nacre_vfs::{Errno, Layer};
use parking_lot::Mutex;
use std::{ffi::OsStr, fmt, os::unix::ffi::OsStrExt, path::Path, sync::Arc};

/// A union, with the locks that keep other unions from writing to its branches.
pub(super) struct Served {
    pub(super) union: Arc<Union>,
    /// The watch tree of all branches.
    tree: Tree,
    /// By the slot of the branch.
    claims: Mutex<Vec<(u8, Claim)>>,
    /// The cages of branches.
    pub(super) cages: Vec<Arc<Cage>>,
}

/// Callback that records the specification of a stack.
pub(super) type Noting = Arc<dyn Fn(&StackSpec) + Send + Sync>;

/// Error of a refused change of branches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BranchError {
    /// A sentence for the user.
    pub what: String,
    /// The underlying error number, if there is one.
    pub reason: Option<Errno>,
}

impl BranchError {
    fn new(what: impl fmt::Display) -> BranchError {
        BranchError { what: what.to_string(), reason: None }
    }
}

impl fmt::Display for BranchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for BranchError {}

impl From<ChangeError> for BranchError {
    fn from(error: ChangeError) -> BranchError {
        BranchError { reason: Some(error.errno()), what: error.to_string() }
    }
}

/// Opens all branches and makes a union of them.
pub(super) fn open(spec: &UnionSpec, context: &Context, warnings: &mut Vec<String>) -> Result<Served, BuildError> {
    let options = spec.options().map_err(|error| error.to_string())?;
    let (mut members, mut claims, mut cages) = (Vec::with_capacity(spec.branch.0.len()), Vec::new(), Vec::new());
    let tree = context.watch_group.clone().unwrap_or_default().tree();
    for branch in &spec.branch.0 {
        let opened = member(branch, (spec, &tree), context, warnings)?;
        cages.extend(opened.cages);
        members.push(opened.member);
        claims.push(opened.claim);
    }
    let compared: Vec<_> = members
        .iter()
        .filter(|_| options.warn_permissions)
        .map(|member| (member.name.clone(), Arc::clone(&member.layer)))
        .collect();
    let union = Arc::new(
        Union::going_on(members, options, context.left_numbers.clone())
            .map_err(|error| BuildError { what: error.to_string(), reason: error.reason })?,
    );
    if let Some(path) = &spec.base_log {
        if !path.is_absolute() {
            return Err(format!("base-log={} has to begin with /", path.display()).into());
        }
        let log = BaseLog::open(path).map_err(|error| format!("cannot open {}: {error}", path.display()))?;
        let frozen = spec.frozen.iter().map(|path| path.as_os_str().as_bytes().to_vec()).collect();
        union.log_hidden_entries(log.frozen(frozen));
    }
    warnings.extend(compared.iter().filter_map(|(name, layer)| other_permissions(&union, name, &**layer)));
    let slots = union.control().list().into_iter().map(|branch| branch.slot);
    let claims = slots.zip(claims).filter_map(|(slot, claim)| claim.map(|claim| (slot, claim))).collect();
    Ok(Served { union, tree, claims: Mutex::new(claims), cages })
}

/// Warning about a branch whose top directory has another owner or mode than the shown one.
fn other_permissions(union: &Union, name: &Path, layer: &dyn Layer) -> Option<String> {
    let permissions = |layer: &dyn Layer| layer.root().ok().map(|root| (root.attr.uid, root.attr.gid, root.attr.mode));
    let (shown, here) = (permissions(union)?, permissions(layer)?);
    let told = |(uid, gid, mode): (u32, u32, u32)| format!("{uid}:{gid} {mode:04o}");
    (shown != here)
        .then(|| format!("branch {}: its top directory is {}, shown is {}", name.display(), told(here), told(shown)))
}

/// An opened branch.
struct OpenedMember {
    member: Member,
    /// Its lock, if it is writable.
    claim: Option<Claim>,
    /// The cages of its stack.
    cages: Vec<Arc<Cage>>,
}

/// Opens a branch, and claims it if it is writable.
fn member(
    branch: &BranchSpec,
    (union, tree): (&UnionSpec, &Tree),
    context: &Context,
    warnings: &mut Vec<String>,
) -> Result<OpenedMember, BranchError> {
    let name = branch.name();
    let within =
        |why: BuildError| BranchError { what: format!("branch {}: {why}", name.display()), reason: why.reason };
    let on_demand = works_on_demand(union)?;
    let claim = claim(branch, &branch.mode, on_demand, context, warnings)?;
    let stack = build_in(&branch.stack(union), context, Some(tree)).map_err(within)?;
    let cages = stack.cages();
    warnings.extend(stack.warnings);
    let lock = if on_demand { work_lock(branch, context) } else { None };
    let member = Member { name, layer: stack.layer, mode: branch.mode.clone(), work: stack.work, lock };
    Ok(OpenedMember { member, claim, cages })
}

/// Whether the union's own directories on branches are there only while they are needed.
fn works_on_demand(union: &UnionSpec) -> Result<bool, BranchError> {
    Ok(union.options().map_err(BranchError::new)?.work_on_demand)
}

impl Stack {
    /// The union at the bottom of the stack, if there is one.
    pub fn union(&self) -> Option<Arc<Union>> {
        self.served().map(|served| Arc::clone(&served.union))
    }

    /// The current specification.
    pub fn spec(&self) -> StackSpec {
        self.spec.lock().clone()
    }

    fn served(&self) -> Option<&Served> {
        self.handles.iter().find_map(|handle| if let Handle::Union(served) = handle { Some(served) } else { None })
    }

    /// Adds a branch to the union, at this index from the top (0 is on top). Returns warnings, like
    /// [`Stack::warnings`].
    ///
    /// # Errors
    /// There is no union, the branch cannot be opened, or the union refuses it.
    pub fn add_branch(&self, branch: BranchSpec, place: usize, context: &Context) -> Result<Vec<String>, BranchError> {
        let mut warnings = Vec::new();
        self.change(|union, served, changing| {
            let place = place.min(union.branch.0.len());
            let OpenedMember { member, claim, cages } = member(&branch, (union, &served.tree), context, &mut warnings)?;
            if !cages.is_empty() {
                return Err(BranchError::new("a branch with a cage can only be there from the start"));
            }
            let (layer, name) = (Arc::clone(&member.layer), branch.name());
            let warns = union.options().is_ok_and(|options| options.warn_permissions);
            union.branch.0.insert(place, branch);
            let slot = changing.to(union).add(member, place)?;
            if warns {
                warnings.extend(other_permissions(&served.union, &name, &*layer));
            }
            served.claims.lock().extend(claim.map(|claim| (slot, claim)));
            Ok(())
        })?;
        Ok(warnings)
    }

    /// Removes a branch from the union, by its index from the top; with `force`, even if files on
    /// it are open.
    ///
    /// # Errors
    /// There is no such branch, or it is in use.
    pub fn remove_branch(&self, place: usize, force: bool) -> Result<(), BranchError> {
        self.change(|union, served, changing| {
            let slot = slot(&served.union.control(), place)?;
            union.branch.0.remove(place);
            changing.to(union).remove(slot, force)?;
            served.claims.lock().retain(|(of, _)| *of != slot);
            Ok(())
        })
    }

    /// Changes the attributes of a branch of the union, by its index from the top. Returns
    /// warnings, like [`Stack::warnings`].
    ///
    /// # Errors
    /// There is no such branch, or files open on it conflict with the new attributes.
    pub fn modify_branch(&self, place: usize, mode: BranchMode, context: &Context) -> Result<Vec<String>, BranchError> {
        let mut warnings = Vec::new();
        self.change(|union, served, changing| {
            let slot = slot(&served.union.control(), place)?;
            let on_demand = works_on_demand(union)?;
            let branch = union.branch.0.get_mut(place).ok_or_else(missing)?;
            let mut claims = served.claims.lock();
            let held = claims.iter().any(|(of, _)| *of == slot);
            let fresh = if held { None } else { claim(branch, &mode, on_demand, context, &mut warnings)? };
            branch.mode = mode.clone();
            changing.to(union).modify(slot, mode.clone())?;
            claims.extend(fresh.map(|claim| (slot, claim)));
            if !mode.writable() {
                claims.retain(|(of, _)| *of != slot);
            }
            Ok(())
        })?;
        Ok(warnings)
    }

    /// Replaces the words of one name by another word that can be changed while mounted.
    ///
    /// # Errors
    /// There is no union, or the word is malformed.
    pub fn set_creation_word(&self, word: &str) -> Result<(), BranchError> {
        let name = |word: &str| word.split_once('=').map_or(word, |(name, _)| name).replace('_', "-");
        self.change(|union, served, _| {
            let is_pool = Words::parse(&Words::join(union.option.iter().map(OsStr::new))).is_ok_and(|words| words.pool);
            // Words that only mergerfs has would make the next process take the union for a
            // mergerfs pool.
            let word = match word.split_once('=') {
                Some(("category.create" | "func.create", policy)) if !is_pool => format!("create={policy}"),
                Some((name, _))
                    if !is_pool && ["category.", "func.", "statfs"].iter().any(|of| name.starts_with(of)) =>
                {
                    return Err(BranchError::new(format!(
                        "{name}: this union is no pool; write it after -o at the mount"
                    )));
                }
                _ => word.to_owned(),
            };
            union.option.retain(|known| name(known) != name(&word));
            union.option.push(word);
            let options = union.options().map_err(BranchError::new)?;
            served.union.control().set_live_rules(&options);
            Ok(())
        })
    }

    /// Registers a callback that records each change of the branches, called when the change has
    /// been made and no user has seen it yet: if this process dies, the last recorded state is what
    /// users have seen. `note` must not use the stack.
    pub fn note_changes(&self, note: impl Fn(&StackSpec) + Send + Sync + 'static) {
        *self.noting.lock() = Some(Arc::new(note));
    }

    fn change(
        &self,
        change: impl FnOnce(&mut UnionSpec, &Served, &Changing<'_>) -> Result<(), BranchError>,
    ) -> Result<(), BranchError> {
        let mut spec = self.spec.lock();
        let none = || BranchError::new("there is no union in this mount");
        let served = self.served().ok_or_else(none)?;
        let mut union = union_of(&mut spec).ok_or_else(none)?.clone();
        let changing = Changing { spec: &spec, noting: self.noting.lock().clone(), union: &served.union };
        change(&mut union, served, &changing)?;
        union_of(&mut spec).into_iter().for_each(|before| *before = union.clone());
        Ok(())
    }
}

/// A change of the branches in progress.
struct Changing<'a> {
    /// The specification before it.
    spec: &'a StackSpec,
    noting: Option<Noting>,
    union: &'a Arc<Union>,
}

impl Changing<'_> {
    /// Returns a control of the union that records the change to these branches.
    fn to(&self, union: &UnionSpec) -> Control {
        let control = self.union.control();
        let Some(noting) = self.noting.clone() else { return control };
        let mut spec = self.spec.clone();
        union_of(&mut spec).into_iter().for_each(|before| *before = union.clone());
        control.telling(move || noting(&spec))
    }
}

fn union_of(spec: &mut StackSpec) -> Option<&mut UnionSpec> {
    spec.layers.iter_mut().find_map(|layer| match layer {
        LayerSpec::Union(union) => Some(union.as_mut()),
        _ => None,
    })
}

fn slot(control: &Control, place: usize) -> Result<u8, BranchError> {
    control.list().get(place).map(|branch| branch.slot).ok_or_else(missing)
}

fn missing() -> BranchError {
    BranchError::new("there is no such branch")
}

impl From<BranchError> for BuildError {
    fn from(error: BranchError) -> BuildError {
        BuildError { what: error.what, reason: error.reason }
    }
}
