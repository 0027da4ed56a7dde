//! Creating a directory on one more branch: its parents first, attributes only.
//!
//! Called before a file is created, hidden or copied on a branch that does not have the directory yet. The
//! whole chain is walked with the tree lock held, so no directory moves meanwhile. A new directory is built in
//! the work directory and renamed to its final name; the rename is durable before the directory gets any entry.

use crate::{
    OWN, UnionShared,
    branches::Branch,
    copy_up::{learn, move_in},
    identity,
    node::{NodePlace, Part, UnionNode, View},
    policy::{BranchView, CreatePolicy, Hold, Placement, Space, Way},
};
use nacre_vfs::{Errno, Kind, Name, Result};
use std::sync::Arc;

/// How the branch for a new file is chosen.
pub(crate) enum NewChoice {
    /// No other branch takes a new file where it would be visible.
    Only(Arc<Branch>),
    /// A route leads to this branch.
    Route { branch: Arc<Branch>, pattern: String },
    /// By a policy: the route's or the usual one. A route is passed over if its branch takes no new files now.
    Policy { policy: CreatePolicy, route: Option<String>, passed_over: bool },
}

/// How the branch for a copy is chosen.
pub(crate) enum CopyChoice {
    /// No other branch can take the copy.
    Only(Arc<Branch>),
    /// By the policy, from these branches.
    Policy(Vec<BranchView>),
}

impl UnionShared {
    /// Returns the part of a directory on a branch, and creates it if missing.
    ///
    /// # Errors
    /// ENOENT where the directory has been removed, EROFS where the branch is not writable, errors of the
    /// storage.
    pub(crate) fn grow(&self, directory: &Arc<UnionNode>, branch: &Arc<Branch>) -> Result<Part> {
        if let Some(part) = directory.part_on(branch) {
            return Ok(part);
        }
        let _tree = self.tree.lock()?;
        self.grow_chain(directory, branch)
    }

    /// Creates the directory and its missing parents, with the tree lock held.
    fn grow_chain(&self, directory: &Arc<UnionNode>, branch: &Arc<Branch>) -> Result<Part> {
        let mut missing: Vec<(Arc<UnionNode>, NodePlace)> = Vec::new();
        let mut at = Arc::clone(directory);
        let mut part = loop {
            if let Some(part) = at.part_on(branch) {
                break part;
            }
            let place = at.place().filter(|_| !at.is_gone()).ok_or(Errno::ENOENT)?;
            let parent = Arc::clone(&place.parent);
            missing.push((at, place));
            at = parent;
        };
        while let Some((node, place)) = missing.pop() {
            part = self.grow_one(&node, &place, &part, branch)?;
        }
        Ok(part)
    }

    fn grow_one(&self, node: &Arc<UnionNode>, place: &NodePlace, parent: &Part, branch: &Arc<Branch>) -> Result<Part> {
        let _names = place.parent.names.write();
        if node.is_gone() {
            return Err(Errno::ENOENT);
        }
        let (layer, work) = (&branch.layer, branch.work_directory()?);
        let top = node.top()?;
        self.mark_home(&place.parent, parent)?;
        let attr = top.branch.layer.getattr(&OWN, &top.node, None)?;
        let temporary = branch.work()?.temporary();
        let made = layer.mkdir(&OWN, &work, temporary.name()?, 0o700)?;
        let part = Part::new(branch, made.node, made.attr.id);
        let name = Name::new(&place.name)?;
        let before = layer.getattr(&OWN, &parent.node, None)?;
        let done = self
            .dress(&top, &attr, &part)
            .and_then(|()| identity::set_origin(&self.identities, branch, &part.node, part.id, node.id))
            .and_then(|()| self.note_hidden_with(&place.parent, &place.name, &top, &attr, Some(&part)))
            .and_then(|()| move_in(&**layer, (&work, temporary.name()?), (&parent.node, name)));
        if let Err(error) = done {
            if let Err(left) = layer.rmdir(&OWN, &work, temporary.name()?) {
                tracing::warn!(branch = branch.index(), error = ?left, "a temporary directory stays in the work directory until the next start");
            }
            // Another thread has made it, or an earlier attempt failed after this step.
            let existing =
                if error == Errno::EEXIST { layer.lookup(&OWN, &parent.node, name)? } else { return Err(error) };
            if existing.attr.kind != Kind::Directory {
                return Err(Errno::ESTALE);
            }
            let part = Part::new(branch, existing.node, existing.attr.id);
            self.make_durable(branch, &parent.node)?;
            node.grow(part.clone());
            return Ok(part);
        }
        // A caller that makes a new entry of it durable need not sync the directories that existed before.
        self.make_durable(branch, &parent.node)?;
        node.grow(part.clone());
        self.listings.forget(place.parent.id);
        learn(&part, parent, name)?;
        self.tidy_parent(&part, parent, &before);
        Ok(part)
    }

    /// Returns a directory's part whose attributes may be changed.
    pub(crate) fn raise_directory(&self, node: &Arc<UnionNode>) -> Result<Part> {
        let top = node.top()?;
        if top.branch.is_writable() {
            return Ok(top);
        }
        let place = node.place();
        let target = self.branch_for_copy(place.as_ref(), top.branch.index(), usize::MAX)?;
        self.grow(node, &target)
    }

    /// Whether a file on a branch could be copied up.
    pub(crate) fn can_rise(&self, index: usize) -> bool {
        self.branches().iter().take(index).any(|branch| branch.creates())
    }

    /// The branch to which a file on branch `source` is copied up, not below `most`.
    pub(crate) fn branch_for_copy(&self, place: Option<&NodePlace>, source: usize, most: usize) -> Result<Arc<Branch>> {
        let fits = |branch: &&Arc<Branch>| branch.index() < source && branch.index() <= most && branch.creates();
        let parent = place.map(|place| place.parent.view());
        let views = match self.choice_for_copy(parent.as_ref(), source, most) {
            CopyChoice::Only(branch) => return Ok(branch),
            CopyChoice::Policy(views) => views,
        };
        let branches = self.branches();
        if !branches.iter().any(|branch| fits(&branch)) {
            return Err(Errno::EROFS);
        }
        let chosen = self.options.copy_up.choose(&views, source)?;
        branches.get(chosen).filter(fits).map(Arc::clone).ok_or(Errno::EIO)
    }

    /// How the branch is chosen to which a file on branch `source` in this directory is copied up, not below
    /// `most`.
    pub(crate) fn choice_for_copy(&self, parent: Option<&View>, source: usize, most: usize) -> CopyChoice {
        let fits = |branch: &&Arc<Branch>| branch.index() < source && branch.index() <= most && branch.creates();
        let branches = self.branches();
        let mut candidates = branches.iter().filter(fits);
        if let (Some(only), None) = (candidates.next(), candidates.next()) {
            return CopyChoice::Only(Arc::clone(only));
        }
        let mut views = self.views(parent);
        for (view, branch) in views.iter_mut().zip(branches.iter()) {
            if !fits(&branch) {
                (view.creates, view.writable) = (false, false);
            }
        }
        CopyChoice::Policy(views)
    }

    /// The branch for a new file of this name, not below `limit`.
    pub(crate) fn branch_for_new(
        &self,
        parent: &Arc<UnionNode>,
        name: Option<Name<'_>>,
        directory: bool,
        limit: usize,
    ) -> Result<Arc<Branch>> {
        let fits = |branch: &&Arc<Branch>| branch.index() <= limit && branch.creates();
        let branches = self.branches();
        if !branches.iter().any(|branch| fits(&branch)) {
            return Err(Errno::EROFS);
        }
        let policy = match self.choice_for_new(parent, name, directory, limit)? {
            NewChoice::Only(branch) => return Ok(branch),
            NewChoice::Route { branch, .. } => return Ok(branch),
            NewChoice::Policy { policy, .. } => policy,
        };
        let views = self.views_for(policy, parent)?;
        let chosen = policy.choose(&Placement { branches: &views, limit, directory }, &self.placing.policy)?;
        branches.get(chosen).filter(fits).map(Arc::clone).ok_or(Errno::EIO)
    }

    /// How the branch for a new file of this name is chosen, not below `limit`.
    pub(crate) fn choice_for_new(
        &self,
        parent: &Arc<UnionNode>,
        name: Option<Name<'_>>,
        directory: bool,
        limit: usize,
    ) -> Result<NewChoice> {
        let fits = |branch: &&Arc<Branch>| branch.index() <= limit && branch.creates();
        let branches = self.branches();
        let mut candidates = branches.iter().filter(fits);
        if let (Some(only), None) = (candidates.next(), candidates.next())
            && self.min_free(only) == 0
        {
            return Ok(NewChoice::Only(Arc::clone(only)));
        }
        let rules = self.rules();
        let usual = rules.create_directories.filter(|_| directory).unwrap_or(rules.create);
        Ok(match self.way(parent, name) {
            Some((Way::Policy(policy), pattern)) => {
                NewChoice::Policy { policy, route: Some(pattern), passed_over: false }
            }
            Some((Way::Branch(index), pattern)) => {
                let branch = self.branch(index)?;
                if fits(&&branch) && self.has_room(&branch)? {
                    NewChoice::Route { branch, pattern }
                } else {
                    NewChoice::Policy { policy: usual, route: Some(pattern), passed_over: true }
                }
            }
            None => NewChoice::Policy { policy: usual, route: None, passed_over: false },
        })
    }

    /// Whether new files may be created on a branch now.
    pub(crate) fn has_room(&self, branch: &Branch) -> Result<bool> {
        let least = self.min_free(branch);
        Ok(branch.creates() && (least == 0 || self.space(branch, Hold::DEFAULT)?.free >= least))
    }

    /// The route that matches a name, with its pattern; `None` where there are no routes, so that paths are not
    /// needed.
    pub(crate) fn way(&self, parent: &UnionNode, name: Option<Name<'_>>) -> Option<(Way, String)> {
        let routes = self.placing.routes.load();
        if routes.is_empty() {
            return None;
        }
        let mut path = parent.path()?;
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(name?.bytes());
        routes.find(&path).map(|(way, pattern)| (way, pattern.to_owned()))
    }

    pub(crate) fn min_free(&self, branch: &Branch) -> u64 {
        branch.mode().min_free.unwrap_or_else(|| self.placing.rules.load().min_free)
    }

    fn space(&self, branch: &Branch, hold: Hold) -> Result<Space> {
        self.placing.space.get(usize::from(branch.slot), self.placing.started.elapsed(), hold.duration(), || {
            branch.layer.statfs(&OWN, &branch.root)
        })
    }

    /// The figures of the branches that a policy for new files uses.
    pub(crate) fn views_for(&self, policy: CreatePolicy, parent: &Arc<UnionNode>) -> Result<Vec<BranchView>> {
        let mut views = self.views(Some(&parent.view()));
        let hold = policy.needs_space();
        for (view, branch) in views.iter_mut().zip(self.branches().iter()) {
            view.min_free = self.min_free(branch);
            if view.creates && (hold.is_some() || view.min_free > 0) {
                let space = self.space(branch, hold.unwrap_or(Hold::DEFAULT))?;
                (view.free, view.used, view.total) = (space.free, space.used, space.total);
            }
        }
        if policy.needs_depth() {
            self.fill_depths(parent, &mut views);
        }
        if policy.needs_times() {
            for part in parent.parts().iter() {
                if let Some(view) = views.get_mut(part.branch.index()) {
                    view.parent_changed = part.branch.layer.getattr(&OWN, &part.node, None)?.mtime;
                }
            }
        }
        Ok(views)
    }

    /// Sets how many components of a directory's path each branch has: the directory itself, its parent, and so
    /// on up to the root, which all have.
    fn fill_depths(&self, parent: &Arc<UnionNode>, views: &mut [BranchView]) {
        let mut way = vec![Arc::clone(parent)];
        while let Some(above) = way.last().and_then(|last| last.place()).map(|place| place.parent) {
            way.push(above);
        }
        let depths = (0_u32..).zip(way.iter().rev());
        for (depth, directory) in depths {
            for part in directory.parts().iter() {
                if let Some(view) = views.get_mut(part.branch.index()) {
                    view.parent_depth = depth;
                }
            }
        }
    }

    /// The figures of the branches that every policy uses.
    pub(crate) fn views(&self, parent: Option<&View>) -> Vec<BranchView> {
        let view = |branch: &Arc<Branch>| BranchView {
            creates: branch.creates(),
            writable: branch.is_writable(),
            parent_exists: parent.is_some_and(|parent| parent.on(branch).is_some()),
            ..BranchView::default()
        };
        self.branches().iter().map(view).collect()
    }
}
