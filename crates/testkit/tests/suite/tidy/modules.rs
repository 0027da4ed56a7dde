//! Which files of a crate name which, and that no circle of them is longer than three files; and that
//! no two types that files show each other have one name.
//!
//! A module and the file that declares it are parts of one thing and may name each other; all other
//! edges count. Tests are left out.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use syn::visit::Visit;

use super::{Complaints, files, root, shown};

/// The longest circle, files.
const CIRCLE_MAX: usize = 3;

type Module = Vec<String>;

/// A crate's modules with their edges.
#[derive(Default)]
struct Graph {
    modules: BTreeMap<Module, syn::File>,
    /// Names that a module passes on, and where they are.
    passed_on: BTreeMap<(Module, String), Module>,
    edges: BTreeMap<Module, BTreeSet<Module>>,
}

impl Graph {
    fn of(source: &Path) -> Graph {
        let mut found = Vec::new();
        files(source, &mut found);
        let mut graph = Graph::default();
        for path in found {
            let inner = path.strip_prefix(source).unwrap().with_extension("");
            let mut module: Module = inner.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
            if ["main", "lib"].contains(&module.join("/").as_str()) {
                module.clear();
            }
            if !module.iter().any(|part| part == "tests") {
                graph.modules.insert(module, syn::parse_file(&std::fs::read_to_string(&path).unwrap()).unwrap());
            }
        }
        let named: Vec<(Module, Named)> = graph
            .modules
            .iter()
            .map(|(module, file)| {
                let mut named = Named::default();
                named.visit_file(file);
                (module.clone(), named)
            })
            .collect();
        for (module, named) in &named {
            for (name, path) in &named.passed_on {
                if let Some((there, rest)) = graph.resolve(module, path)
                    && !rest.is_empty()
                {
                    graph.passed_on.insert((module.clone(), name.clone()), there);
                }
            }
        }
        for (module, named) in named {
            for path in named.paths {
                let Some((mut there, rest)) = graph.resolve(&module, &path) else { continue };
                for _ in 0..8 {
                    let Some(next) = rest.first().and_then(|name| graph.passed_on.get(&(there.clone(), name.clone())))
                    else {
                        break;
                    };
                    there.clone_from(next);
                }
                if !there.starts_with(&module) && !module.starts_with(&there) {
                    graph.edges.entry(module.clone()).or_default().insert(there);
                }
            }
        }
        graph
    }

    /// The module that a path leads to, and what is left of the path.
    fn resolve(&self, from: &Module, path: &[String]) -> Option<(Module, Vec<String>)> {
        let mut rest = path;
        let mut at = match rest.first()?.as_str() {
            "crate" => Module::new(),
            "self" | "super" => from.clone(),
            first => {
                let child = [from.as_slice(), &[first.to_owned()]].concat();
                self.modules.contains_key(&child).then(|| from.clone())?
            }
        };
        while let Some(word @ ("crate" | "self" | "super")) = rest.first().map(String::as_str) {
            if word == "super" {
                at.pop()?;
            }
            rest = &rest[1..];
        }
        while let Some(first) = rest.first() {
            let child = [at.as_slice(), std::slice::from_ref(first)].concat();
            if !self.modules.contains_key(&child) {
                break;
            }
            (at, rest) = (child, &rest[1..]);
        }
        Some((at, rest.to_vec()))
    }

    /// Files each of which can be reached from each other one.
    fn circles(&self) -> Vec<BTreeSet<Module>> {
        let reached: BTreeMap<&Module, BTreeSet<&Module>> =
            self.modules.keys().map(|module| (module, self.reached(module))).collect();
        let mut circles: Vec<BTreeSet<Module>> = Vec::new();
        for (module, there) in &reached {
            let circle: BTreeSet<Module> = there
                .iter()
                .filter(|other| reached.get(**other).is_some_and(|back| back.contains(module)))
                .map(|other| (*other).clone())
                .collect();
            if circle.len() > 1 && !circles.contains(&circle) {
                circles.push(circle);
            }
        }
        circles
    }

    /// Names of more than one type that is seen outside of its file.
    fn shared_names(&self) -> BTreeSet<String> {
        let mut seen = BTreeSet::new();
        let types = self.modules.values().flat_map(|file| &file.items).filter_map(|item| match item {
            syn::Item::Struct(item) => Some((&item.vis, &item.ident)),
            syn::Item::Enum(item) => Some((&item.vis, &item.ident)),
            syn::Item::Trait(item) => Some((&item.vis, &item.ident)),
            syn::Item::Type(item) => Some((&item.vis, &item.ident)),
            _ => None,
        });
        let shown = types.filter(|(visibility, _)| !matches!(visibility, syn::Visibility::Inherited));
        shown.map(|(_, name)| name.to_string()).filter(|name| !seen.insert(name.clone())).collect()
    }

    fn reached<'a>(&'a self, from: &'a Module) -> BTreeSet<&'a Module> {
        let (mut reached, mut next) = (BTreeSet::new(), vec![from]);
        while let Some(module) = next.pop() {
            for there in self.edges.get(module).into_iter().flatten() {
                if reached.insert(there) {
                    next.push(there);
                }
            }
        }
        reached
    }
}

/// What a file names.
#[derive(Default)]
struct Named {
    /// As they would be written at the top of the file.
    paths: BTreeSet<Vec<String>>,
    passed_on: Vec<(String, Vec<String>)>,
    /// Names of modules that were brought into scope, with their paths.
    brought: BTreeMap<String, Vec<String>>,
    /// How many modules within the file stand around what is looked at.
    depth: usize,
}

impl Named {
    fn add(&mut self, mut path: Vec<String>) {
        // Within a module of the file, `super` is the file.
        for _ in 0..self.depth {
            if path.first().is_some_and(|word| word == "super") {
                path[0] = "self".to_owned();
            }
        }
        if let Some(brought) = path.first().and_then(|first| self.brought.get(first)) {
            path = brought.iter().chain(&path[1..]).cloned().collect();
        }
        self.paths.insert(path);
    }

    fn tree(&mut self, tree: &syn::UseTree, before: &[String], public: bool) {
        let with = |ident: &syn::Ident| [before, &[ident.to_string()]].concat();
        match tree {
            syn::UseTree::Path(path) => self.tree(&path.tree, &with(&path.ident), public),
            syn::UseTree::Group(group) => group.items.iter().for_each(|item| self.tree(item, before, public)),
            syn::UseTree::Glob(_) => self.add([before, &["*".to_owned()]].concat()),
            syn::UseTree::Name(name) if name.ident == "self" => self.bring(before.to_vec(), None, public),
            syn::UseTree::Name(name) => self.bring(with(&name.ident), None, public),
            syn::UseTree::Rename(rename) if rename.ident == "self" => {
                self.bring(before.to_vec(), Some(rename.rename.to_string()), public);
            }
            syn::UseTree::Rename(rename) => self.bring(with(&rename.ident), Some(rename.rename.to_string()), public),
        }
    }

    fn bring(&mut self, path: Vec<String>, name: Option<String>, public: bool) {
        let name = name.or_else(|| path.last().cloned()).unwrap_or_default();
        if public {
            self.passed_on.push((name, path));
        } else {
            self.add(path.clone());
            if path.first().is_some_and(|first| ["crate", "super", "self"].contains(&first.as_str())) {
                self.brought.insert(name, path);
            }
        }
    }

    /// Paths in what a macro is given, which nobody has parsed yet.
    fn tokens(&mut self, tokens: proc_macro2::TokenStream) {
        let (mut path, mut colons) = (Vec::new(), 0);
        for token in tokens {
            match token {
                proc_macro2::TokenTree::Ident(ident) if path.is_empty() || colons == 2 => {
                    path.push(ident.to_string());
                    colons = 0;
                    continue;
                }
                proc_macro2::TokenTree::Punct(punct) if punct.as_char() == ':' && !path.is_empty() => {
                    colons += 1;
                    continue;
                }
                proc_macro2::TokenTree::Group(group) => self.tokens(group.stream()),
                proc_macro2::TokenTree::Ident(ident) => {
                    self.end(&mut path);
                    path.push(ident.to_string());
                    colons = 0;
                    continue;
                }
                _ => {}
            }
            self.end(&mut path);
            colons = 0;
        }
        self.end(&mut path);
    }

    fn end(&mut self, path: &mut Vec<String>) {
        let path = std::mem::take(path);
        if path.len() > 1 {
            self.add(path);
        }
    }
}

fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let syn::Meta::List(list) = &attribute.meta else { return false };
        list.path.is_ident("cfg") && list.tokens.to_string().contains("test")
    })
}

impl<'ast> Visit<'ast> for Named {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if !is_test(&item.attrs) {
            self.tree(&item.tree, &[], !matches!(item.vis, syn::Visibility::Inherited));
        }
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test(&item.attrs) && item.content.is_some() {
            self.depth += 1;
            syn::visit::visit_item_mod(self, item);
            self.depth -= 1;
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if !is_test(&item.attrs) {
            syn::visit::visit_item_fn(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        if !is_test(&item.attrs) {
            syn::visit::visit_item_impl(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !is_test(&item.attrs) {
            syn::visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.segments.len() > 1 {
            self.add(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        }
        syn::visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, item: &'ast syn::Macro) {
        self.tokens(item.tokens.clone());
        syn::visit::visit_macro(self, item);
    }
}

fn named(circle: &BTreeSet<Module>) -> String {
    circle.iter().map(|module| module.join("::")).collect::<Vec<_>>().join(", ")
}

#[test]
fn no_circle_of_files_is_long_and_no_two_types_share_a_name() {
    let mut complaints = Complaints::default();
    for entry in std::fs::read_dir(root().join("crates")).unwrap() {
        let source = entry.unwrap().path().join("src");
        let graph = Graph::of(&source);
        for shared in graph.shared_names() {
            complaints.add(&shown(&root(), &source), 0, format!("two of its types have the name {shared}"));
        }
        let longest = graph.circles().into_iter().max_by_key(BTreeSet::len).unwrap_or_default();
        if longest.len() > CIRCLE_MAX {
            let what = format!("{} files name each other in a circle: {}", longest.len(), named(&longest));
            complaints.add(&shown(&root(), &source), 0, what);
        }
    }
    complaints.none();
}

#[test]
fn circles_and_shared_names_are_found() {
    let graph_of = |files: &[(&str, &str)]| {
        let scratch = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = scratch.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        Graph::of(scratch.path())
    };
    let graph = graph_of(&[
        ("lib.rs", "mod a; mod b; mod c; pub use c::C;"),
        ("a.rs", "use crate::{b::{self}, C}; fn f() { b::g() }"),
        ("b.rs", "fn g() -> crate::d::D { println!(\"{}\", super::c::C) }"),
        ("c.rs", "mod e; #[cfg(test)] mod tests { use crate::b; } fn h(_: &e::E) {}"),
        ("c/e.rs", "use super::C; impl E { fn i() { crate::a::f() } }"),
    ]);
    let found = graph.circles();
    assert_eq!(found.len(), 0, "a and b name c, and c only its own part, which names a: {found:?}");
    let graph = graph_of(&[
        ("lib.rs", "mod a; mod b; mod c; pub struct D;"),
        ("a.rs", "use super::b::B; pub type A = B; struct D;"),
        ("b.rs", "fn g() { vec![crate::c::C] } pub(super) enum A {}"),
        ("c.rs", "use crate::a::A as B;"),
    ]);
    assert_eq!(Vec::from_iter(graph.shared_names()), ["A"]);
    assert_eq!(graph.circles().iter().map(named).collect::<Vec<_>>(), ["a, b, c"]);
}
